"""`python -m prefill_worker`: one worker, which begins as a prefill worker."""

from baton.serving.optional_dependencies import exit_without

if __name__ == "__main__":
    exit_without("worker", "prefill")
    from baton.roles import main

    main("prefill")
