"""`python -m decode_worker`: one worker, which begins as a decode worker."""

from baton.roles import main

if __name__ == "__main__":
    main("decode")
