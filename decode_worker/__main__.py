"""`python -m decode_worker`: one worker, which begins as a decode worker."""

from baton.serving.optional_dependencies import exit_without

if __name__ == "__main__":
    exit_without("worker", "decode")
    from baton.roles import main

    main("decode")
