"""Torture: every step killed, failed and cut from power at every system call; see __main__."""
