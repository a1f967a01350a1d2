"""Session: [session] joins the ranks and builds the parts of one attempt for the loop."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__

from cluster.rank import ATTEMPT_VARIABLE, RankEnv
from cluster.runs import RunFolder
from cluster.signals import STOP_SIGNALS, StopFlag
from cluster.spec import JobSpec
from jobs import alarm
from jobs.attempt import join_attempt, own_job_id
from jobs.batch import place_data
from jobs.control import Control
from jobs.data import DataSet, open_staged
from jobs.deadlines import Deadlines
from jobs.descriptors import make_room
from jobs.device import choose_device, environment_of, use_device
from jobs.failure import Whereabouts
from jobs.faults import Faults
from jobs.interfaces import check_interfaces
from jobs.learner import Learner
from jobs.lookups import dns_silenced
from jobs.loop import Loop
from jobs.metrics import Recorder
from jobs.model import build_model
from jobs.numerics import Numerics, choose_precision
from jobs.parallel import check_compiler, wrap
from jobs.phases import Phases
from jobs.places import Place, meet, own_place
from jobs.rendezvous import connect, gloo_interface
from jobs.restore import Position, find_position, load
from jobs.saver import Saver
from jobs.state import TrainState
from jobs.step import Length, Stepper
from jobs.watchdog import Watch

log = logging.getLogger("run")

# The watch ends a collective that waits for a silent peer; a dead one is noticed at once.  Torch's own limit would also
# end a job that was suspended for longer, since its clock goes on meanwhile.
COLLECTIVE_S = 7 * 86400.0  # in milliseconds less than 2**31, which is what poll(2) takes


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """What all ranks of an attempt share once they have met."""

    spec: JobSpec
    env: RankEnv
    data: DataSet
    device: torch.device
    control: Control
    run: RunFolder
    attempt: int
    watch: Watch = dataclasses.field(default_factory=Watch)
    faults: Faults = dataclasses.field(default_factory=Faults)
    all_have_bf16: bool = True  # whether every rank's device has units for it
    phases: Phases = dataclasses.field(default_factory=Phases)


def network_variables(env: RankEnv, environ: Mapping[str, str]) -> dict[str, str]:
    """Which network gloo uses, unless the user said: a host name that maps to 127.0.1.1 would mislead it."""
    interface = None if "GLOO_SOCKET_IFNAME" in environ else gloo_interface(env.master_addr)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


def join(
    spec: JobSpec, env: RankEnv, stop: StopFlag, where: Whereabouts, environ: Mapping[str, str], phases: Phases
) -> Session:
    """Open the data, choose the device, meet the other ranks and agree on run folder and attempt.

    What this rank can find wrong by itself comes first: the others need not wait for it.
    """
    data = open_staged(spec.dataset)
    phases.end("data")
    device, own = take_place(spec, env, environ)
    phases.end("device")
    alarm.wind(spec.train.start_timeout_s)
    watch = Watch(Deadlines.of(spec))
    told_attempt = int(environ.get(ATTEMPT_VARIABLE, "1"))  # without a supervisor it is known only once all have met
    Faults.of(spec, env, told_attempt).before_meeting(env.master_ports[0])
    with dns_silenced() as silence_dns:
        # Without the name of an interface gloo looks up this host's own name, which may be known to DNS only.
        on_resolved = silence_dns if "GLOO_SOCKET_IFNAME" in environ else lambda: None
        store = connect(env, timeout_s=spec.train.start_timeout_s, on_resolved=on_resolved)
        watch.start(store, spec, env, where, stop, environ)  # its own connection would be looked up, too
        all_have_bf16 = meet(own, spec, env, store, timeout_s=COLLECTIVE_S)
        phases.end("meeting")
        group = make_groups(env, device, store)
    phases.end("groups")
    for name, handler in stop.take_back().items():
        log.warning("%s was handled by %r: a library took it; it stops the run again", name, handler)
    watch.at("preparing", 0)
    run, attempt = join_attempt(spec, where.maybe_run_dir, env, store, environ)
    faults = Faults.of(spec, env, attempt, stop.is_set)
    data = place_data(data, device)
    phases.end("attempt")
    return Session(spec, env, data, device, Control(group, stop), run, attempt, watch, faults, all_have_bf16, phases)


def take_place(spec: JobSpec, env: RankEnv, environ: Mapping[str, str]) -> tuple[torch.device, Place]:
    """This rank's device, ready to compute, and its place among the others."""
    num_visible = torch.cuda.device_count()
    device = choose_device(spec, env, environ, num_visible=num_visible)
    use_device(device, spec)
    check_compiler(spec.train, environ)
    check_interfaces(backend_of(device), environ)
    make_room(env.rank, env.world_size, backend_of(device))
    return device, own_place(env, device, environ, num_visible=num_visible)


def backend_of(device: torch.device) -> str:
    """What sums the gradients."""
    return "nccl" if device.type == "cuda" else "gloo"


def make_groups(env: RankEnv, device: torch.device, store: Store) -> dist.ProcessGroup:
    """Make the default group, for gradients; returns the one in which ranks agree."""
    limit = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(backend_of(device), store=store, rank=env.rank, world_size=env.world_size, timeout=limit)
    group = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(group, dist.ProcessGroup)  # a rank outside the group would get a number
    return group


def is_finished(session: Session) -> bool:
    """Whether the run was finished before; as rank 0 sees it, since another node's file system may be behind."""
    is_there = session.env.rank == 0 and session.run.summary.exists()
    return bool(session.control.broadcast_object(is_there))


def build(session: Session, environ: Mapping[str, str]) -> Loop:
    """Model on its device, checkpoint into it, then DDP around it; ready for the first step."""
    spec, env, device, phases = session.spec, session.env, session.device, session.phases
    # Its supervisor has asked Slurm for it: an array member's number may be the array's.
    job_id = session.run.read_attempt(session.attempt).get("job_id") or own_job_id(environ)
    recorder = Recorder(
        session.run,
        attempt=session.attempt,
        job_id=job_id,
        writes=env.rank == 0,
        stop_name=session.watch.stop_name,
    )
    length = Length.of(spec, len(session.data.train_labels), env.world_size)
    position = position_of(session, recorder, length)
    phases.end("restore")
    state, length, numerics = position.state, position.length, Numerics(device, position.precision)
    learner = make_learner(session, position, numerics)
    phases.end("model")
    if spec.train.tensorboard:
        recorder.start_mirror()  # metrics.jsonl has been cut back
    announce(recorder, session, length, state, numerics)
    session.faults.announce()
    ddp = wrap(learner.model, device, spec.train)
    phases.end("ddp")
    stepper = Stepper(spec, env, session.data, numerics, ddp, learner, length)
    stepper.settle()
    phases.end("buckets")
    saver = make_saver(session, recorder, learner, state, numerics)
    phases.end("saver")
    return Loop(
        spec=spec,
        env=env,
        data=session.data,
        numerics=numerics,
        learner=learner,
        stepper=stepper,
        control=session.control,
        recorder=recorder,
        state=state,
        length=length,
        saver=saver,
        faults=session.faults,
        saved_step=state.step,
        phases=phases,
        watch=session.watch,
    )


def position_of(session: Session, recorder: Recorder, length: Length) -> Position:
    """From where the run goes on.  length: of a new run."""
    wanted = session.spec.train.precision
    return find_position(
        session.control,
        recorder,
        length=length,
        precision=choose_precision(wanted, all_have_bf16=session.all_have_bf16),
        keeps_precision=wanted == "auto",
        environment=environment_of(session.device, session.spec, session.env),
    )


def make_learner(session: Session, position: Position, numerics: Numerics) -> Learner:
    """Model and optimizer as the position has them."""
    spec = session.spec
    torch.manual_seed(spec.train.seed)
    model = build_model(spec.train.model, session.data.num_classes)
    learner = Learner.of(numerics.place(model), spec.train)
    load(learner, position, session.control)
    return learner


def make_saver(session: Session, recorder: Recorder, learner: Learner, state: TrainState, numerics: Numerics) -> Saver:
    """The saver, which has tried whether the storage takes a checkpoint."""
    spec = session.spec
    environment = {**environment_of(session.device, spec, session.env), "precision": numerics.precision}
    best = state.best_step if state.best_step >= 0 else None
    saver = Saver(recorder, spec.checkpoint, learner, environment, session.faults, state.step, best)
    saver.lead_s = spec.signal_lead_s if spec.cluster == "slurm" else math.inf
    saver.prepare()
    return saver


def announce(recorder: Recorder, session: Session, length: Length, state: TrainState, numerics: Numerics) -> None:
    """Start the heartbeat, and say what is about to be trained."""
    recorder.beat(
        total_steps=length.total_steps,
        steps_per_epoch=length.steps_per_epoch,
        global_batch=length.global_batch,
        step=state.step,
    )
    recorder.start_beating()
    log.info("run folder: %s", session.run.path)
    log.info(
        "%s on %d ranks (%s), %s, %s, global batch %d, %d steps in all, from step %d, stops on %s",
        session.spec.train.model,
        session.env.world_size,
        session.env.launcher,
        session.device.type,
        numerics.precision,
        length.global_batch,
        length.total_steps,
        state.step,
        ", ".join(number.name for number in STOP_SIGNALS),
    )


def leave_together(loop: Loop) -> None:
    """Return on every rank once all are done: no rank leaves before rank 0 has committed what it writes."""
    loop.watch.at("leaving", loop.state.step)
    loop.control.wait_for_all()
    loop.recorder.stop_beating()
    dist.destroy_process_group()
    loop.watch.end()
