"""Read a password from the terminal, or from one line of standard input when that is not a terminal."""

import getpass
import sys

from keyvault.domain.plaintext import Plaintext


def read_password() -> Plaintext:
    return Plaintext(getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n"))
