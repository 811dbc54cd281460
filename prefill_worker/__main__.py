"""`python -m prefill_worker`: one worker, which begins as a prefill worker."""

from baton.roles import main

if __name__ == "__main__":
    main("prefill")
