"""The training program that every route runs.  Never imports submitit."""
