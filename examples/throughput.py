"""What batch invariance costs a whole model: decoding, prefill and scoring, stock and converted, in one process.

python examples/throughput.py                                   # SmolLM2-135M, dynamic and static cache
python examples/throughput.py Qwen/Qwen3-0.6B --batch 1,32 --cache dynamic
python examples/throughput.py --random-weights Qwen3-8B --profile --time-limit 500 --out results

Stock is Transformers at its best for the cache: with a static one on a GPU, `generate` compiles it anew for every size
(half a minute and more each for a large model). Before a time is taken, the first and the last sequence of the batch
must have the bits that they have alone; where they do not, there is no time and the exit status is 1. Rows are written
to <out>/<model>.json one by one, and `--resume` goes on from there.
"""

import sys

from hf_batchinv.throughput.command import main

if __name__ == "__main__":
    sys.exit(main())
