"""Architecture: who may import whom, imports inside functions too, and who may look at the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(REPOSITORY) for package in ("cluster", "jobs") for path in (REPOSITORY / package).glob("*.py")
)
SHARED_WITH_JOBS = {f"cluster.{name}" for name in ("spec", "allocation", "rank", "signals", "runs", "keep")}
STANDARD = sys.stdlib_module_names | {"cluster"}
# Modules of which nothing but the standard library is needed: they run before, or without, what a spec needs.
BARE = (
    "allocation", "rank", "signals", "runs", "slurm", "address", "launch", "verdict", "requeue", "job", "history",
    "index", "plan", "supervise", "chain", "successor", "predecessor", "exclude", "environment", "checkpoints",
    "clusters", "identity", "orders", "grace", "conditions", "start_watch", "job_end", "limits", "step",
    "early_signals", "attempt_start", "owner", "queue", "facts", "view", "run_state", "stop", "cancel",
    "site", "site_answers", "features", "refusals",
    "disk", "prune",
    "status", "logs", "why", "follow", "comment",
    "start", "setup", "container", "worktree", "code", "provenance", "keep",
)  # fmt: skip


def parse(path: Path) -> ast.Module:
    return ast.parse((REPOSITORY / path).read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules that a tree imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = str(node.module)
            yield from (f"{module}.{name.name}" if module in ("cluster", "jobs") else module for name in node.names)


def packages(tree: ast.AST) -> set[str]:
    """The first parts of those names."""
    return {name.split(".")[0] for name in imports(tree)}


def functions_using_environ(tree: ast.AST, function: str = "<module>") -> Iterator[str]:
    """Names of the innermost functions that mention os.environ or os.getenv."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
            yield function
        yield from functions_using_environ(node, inside)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_module_imports_only_what_its_package_may(path: Path) -> None:
    tree = parse(path)
    used = packages(tree)
    if path.parts[0] == "cluster":
        assert not used & {"torch", "torchvision", "jobs"}
        assert "submitit" not in used or path == Path("cluster/submit.py")
        assert used - STANDARD <= {"pydantic", "pydantic_core", "yaml", "rich", "submitit"}
    else:
        assert "submitit" not in used
        assert {name for name in imports(tree) if name.startswith("cluster.")} <= SHARED_WITH_JOBS


@pytest.mark.parametrize("path", FILES, ids=str)
def test_rich_is_imported_only_where_it_draws(path: Path) -> None:
    at_import = [node for node in parse(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "rich" not in packages(ast.Module(list(at_import), []))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_environment_is_read_by_the_program_and_handed_on(path: Path) -> None:
    # jobs.train's attend is the half of its main that comes after the heavy imports.
    allowed = {"main", "attend"} if path == Path("jobs/train.py") else {"main"}
    assert set(functions_using_environ(parse(path))) <= allowed


def test_only_the_supervisor_decides_what_an_end_means() -> None:
    users = {
        module: [str(path) for path in FILES if module in imports(parse(path))]
        for module in ("cluster.verdict", "cluster.requeue", "cluster.history", "cluster.job")
    }
    assert users == {
        "cluster.verdict": ["cluster/chain.py", "cluster/history.py", "cluster/supervise.py"],
        "cluster.requeue": ["cluster/exclude.py", "cluster/history.py", "cluster/supervise.py"],
        "cluster.history": ["cluster/supervise.py"],
        "cluster.job": [
            "cluster/attempt_start.py",
            "cluster/chain.py",
            "cluster/comment.py",
            "cluster/grace.py",
            "cluster/history.py",
            "cluster/predecessor.py",
            "cluster/raw.py",
            "cluster/supervise.py",
        ],
    }


def loaded_by(module: str) -> set[str]:
    """Packages that are loaded once a module has been imported."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", BARE)
def test_module_loads_nothing_but_the_standard_library(module: str) -> None:
    assert not loaded_by(f"cluster.{module}") & {"pydantic", "yaml", "torch", "submitit", "rich", "jobs"}


def test_submission_loads_neither_torch_nor_rich() -> None:
    assert not loaded_by("cluster.submit") & {"torch", "torchvision", "rich", "jobs"}
