"""The command line of with_qlora.py, read before the engines are imported, which takes many seconds."""

import argparse
from pathlib import Path

from common import installed
from common.engine_files import qlora
from common.errors import Parser, UserError, one_line_errors
from common.launcher import environment

ENGINES = ("accelerate", "bitsandbytes", "peft", "safetensors", "transformers")


def read_command(description: str, argv: list[str] | None = None) -> tuple[argparse.Namespace, dict]:
    """The options, and the settings in the file of --config. What is wrong is one line and exit code 2."""
    installed.at_start()
    with one_line_errors():
        line = options(description.split("\n\n")[0]).parse_args(argv)
        settings, ranks = qlora(line.config), environment()[1]
        if line.merge and not line.adapter:
            raise UserError("--merge needs --adapter, the folder of what is merged")
        if line.adapter and ranks > 1:
            raise UserError("--adapter is evaluated by one process: start it without torchrun")
        for option, folder in (("--make-base", line.make_base), ("--out", line.out), ("--merge", line.merge)):
            if folder:  # asked before anything is computed that could not be written
                try:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise UserError(f"{option} {folder}: {error.strerror}") from error
        if lacks := installed.missing(ENGINES, "requirements-engines.txt"):
            raise UserError(lacks)
    return line, settings


def options(description: str) -> Parser:
    parser = Parser(description=description)
    parser.add_argument("--config", required=True, help="a file like configs/engines/fsdp_qlora.yaml")
    parser.add_argument("--base", default="", help="a folder that from_pretrained can load, which is fine-tuned")
    parser.add_argument("--text", default="", help="file or folder to learn from (default: Python's standard library)")
    parser.add_argument("--out", default="", help="a folder for the adapters, as peft writes them")
    parser.add_argument("--adapter", default="", help="train nothing, and evaluate the adapters of this folder")
    parser.add_argument("--merge", default="", help="with --adapter: a folder for base and adapters in one model")
    parser.add_argument("--make-base", default="", metavar="DIR", help="write the model of --config there, untrained")
    parser.add_argument("--check", type=int, metavar="RANKS", help="the bytes on each of RANKS, and train nothing")
    return parser
