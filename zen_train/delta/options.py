"""Options that several commands of `python -m zen_train.delta` have."""

import argparse


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The artifact that a command works on."""
    parser.add_argument("delta", metavar="DELTA", help="folder of the delta artifact")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not possible; at least 1 is needed")
    return value
