"""Does a model's result depend on the batch? `verify` runs one sequence in every surrounding and compares bits.

| file | what happens there |
|---|---|
| subject.py | what kind of model it is, and the token ids it is asked |
| sequence.py | a text, and the means to run it |
| cases.py | the axes: every way to run a sequence that must not change its bits |
| run.py | runs the cases, counts what differs, builds the report |
| compare.py | bits, ulps, KL and greedy tokens of two results |
| align.py | where a sequence's real tokens are in any tensor inside the model |
| bisect.py | the first module, and the first operator in it, with equal inputs and other outputs |
| report.py, table.py, plot.py, page.py | the result: data, terminal, PNG, HTML |

SOURCES.md lists what makes results vary in stock code, axis by axis, and where it is dealt with.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from .report import Report


def verify(
    model: "nn.Module",
    tokenizer: Any = None,
    texts: "Sequence[str] | None" = None,
    axes: "str | Sequence[str]" = "all",
    budget: int = 6,
    *,
    max_tokens: int = 256,
    bisect: bool = True,
    progress: bool = True,
) -> "Report":
    """Run sequences alone and in every surrounding that must not change their bits, and report what differs.

    The model is run as it is, converted or stock, on its own device, in its own dtype, in eval mode. Compared are the
    outputs of a sequence's real tokens: logits (tokens, vocabulary), or the last hidden state where there is no head.

    Args:
        model: a Transformers model that takes `input_ids`: decoder, encoder, encoder-decoder or vision-language.
        tokenizer: its tokenizer. None: random token ids from a fixed generator.
        texts: the sequences; needs a tokenizer. None: built-in texts.
        axes: "all", or names of `hf_batchinv.verify.cases.AXES`.
        budget: the most cases of each axis (int >= 1), shared out over the texts. A number and not a time, so that one
            call gives one report.
        max_tokens: so many tokens of a text are used (int >= 16).
        bisect: name the first module and operator that differ, for every axis that does.
        progress: a progress bar on standard error.

    Raises VerifyError (a ValueError) if an argument cannot be followed or the model cannot be run at all.
    """
    from .run import run

    return run(
        model,
        tokenizer,
        texts,
        axes,
        budget,
        max_tokens=max_tokens,
        bisect=bisect,
        progress=progress,
    )
