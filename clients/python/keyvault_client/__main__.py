"""`python -m keyvault_client COMMAND`."""

import sys


def main(arguments: list[str]) -> int:
    if arguments[:1] != ["rotate-agent"]:
        sys.stderr.write("Usage: python -m keyvault_client rotate-agent --help\n")
        return 2
    # It requires the extra `sealed`.
    from keyvault_client.rotate_agent import main as rotate_agent

    return rotate_agent(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
