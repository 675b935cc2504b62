# SPDX-License-Identifier: Apache-2.0
"""The commands of the documents do what the documents say: those that this machine can execute are executed, as they stand and in order."""

import pytest
from blocks import ROOT, Block, blocks, pages, problem
from walk import Given, can_walk, walk

# A tiny model with random weights, and a thread for each process of vLLM: what a machine of two cores serves.
MODEL = f"""export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1 VLLM_USE_AOT_COMPILE=0
MODEL=$(PYTHONPATH={ROOT}/deploy/dynamo python -c '
import pathlib, tiny_model
print(tiny_model.tiny_model(pathlib.Path("models").absolute()))')
# vLLM's program asks for the metadata of `vllm`, which the wheel for CPUs has under another name.
mkdir -p metadata/vllm-0.31.0+cpu.dist-info
printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.31.0+cpu\\n' >metadata/vllm-0.31.0+cpu.dist-info/METADATA
export PYTHONPATH={ROOT}/deploy/dynamo/cpu_harness:$PWD/metadata
"""
# The prompt of a first question, without a temperature; the second engine's worth of a check: the pool has blocks of it.
ASK = """body='{"model": "'$MODEL'", "prompt": "'$(printf 'a pool of memory %.0s' $(seq 200))'", "max_tokens": 16}'
curl -sf http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "$body" | grep -q '"text"'
for attempt in $(seq 60); do cxlctl --json cache stat | grep -q '"ready": [1-9]' && break; sleep 1; done
cxlctl --json cache stat | grep '"ready": [1-9]'
curl -sf http://127.0.0.1:8000/metrics | grep 'vllm:kvbm_cxl_published_blocks_total.*stored.* [1-9]'
"""
# A program that keeps memory under a name, and one without, and prints the offset of the second.
KEEP = """cat >keep.py <<'END'
import kvbm_cxl, os
pool = kvbm_cxl.Pool("/dev/shm/kv")
memory = [pool.allocate(4096, name="kv-buffers"), pool.allocate(4096, kept=True)]
print(hex(memory[1].offset), flush=True)
os.kill(os.getpid(), 9)
END
"""
TRACE = """python - <<'END'
import json, random
draw = random.Random(1)
for number in range(60):
    ids = list(range(draw.randrange(4) * 10, draw.randrange(1, 8))) or [900 + number]
    line = {"timestamp": 500 * number, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids}
    print(json.dumps(line), file=open("trace.jsonl", "a"))
END
"""
# Two processes that record requests.
RECORDS = """mkdir records
for process in 1 2; do python - <<'END'
import kvbm_cxl
recorder = kvbm_cxl.TraceRecorder("records", "a salt", block_tokens=16)
namespace = kvbm_cxl.Namespace(
    model="m", dtype="float16", layer_count=1, kv_head_count=1, head_size=1, block_tokens=16, layout="NHD"
)
for number in range(20):
    keys = [kvbm_cxl.chain_key(None, [number % 5, index]) for index in range(6)]
    recorder.asked(namespace, keys, 96, 0)
    recorder.published(namespace, keys)
END
done
"""
# By page and number of the walk.
GIVEN = {
    ("docs/operating/cxlctl.md", 0): Given(
        before=TRACE + KEEP + RECORDS,
        words={
            "KEY --namespace NS": f"{'0' * 32} --namespace {'0' * 32} || [ $? -eq 1 ]",
            "record DIR": "record records",
            "cxlctl erase": 'kill "${pids[@]}"; wait "${pids[@]}" || [ $? -eq 143 ]; pids=(); cxlctl erase',
            "cxlctl free NAME": "CXL_MACHINE_ID=program python keep.py || cxlctl free kv-buffers",
        },
        lasting={"cxlctl host ": None, "cxlctl top": None},
    ),
    ("docs/operating/cxlctl.md", 1): Given(
        before=KEEP + "export CXL_POOL=/dev/shm/kv,size=256M\ncxlctl format --cells 256K:50%\nunnamed=$(python keep.py || true)",
        words={"0x2c00000": "$unnamed"},
    ),
    ("docs/operating/format.md", 1): Given(words={"64G": "512M"}),
    ("docs/operating/sizing.md", 0): Given(before=TRACE, after="test -s rack.toml"),
    ("docs/start/vllm.md", 0): Given(before=MODEL, words={"--model MODEL": "--model $MODEL"}),
    ("docs/start/rack.md", 0): Given(
        before=MODEL, words={"vllm serve MODEL": "vllm serve $MODEL"}, lasting={"vllm serve": 8000}, after=ASK, timeout_s=900
    ),
}


def walks(page):
    """The blocks of each walk through a page."""
    found = []
    for block in blocks(page):
        if block.mark in ("machine", "machine, afresh"):
            if block.mark != "machine" or not found:
                found.append([])
            found[-1].append(block)
    return found


@pytest.mark.parametrize(("page", "number"), [(page, number) for page in pages() for number in range(len(walks(page)))])
def test_a_page_can_be_followed(page, number, tmp_path):
    if reason := can_walk():
        pytest.skip(reason)
    given = GIVEN.get((page, number), Given())
    done = walk(page, walks(page)[number], given, tmp_path)
    logs = "".join(f"\n{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(tmp_path.glob("lasting.*")))
    assert done.returncode == 0, f"{done.stderr[-5000:]}{logs if done.returncode else ''}"


def test_what_is_not_walked_is_listed(capsys):
    """Prints the blocks that no test executes, with their reasons."""
    found = [block for page in pages() for block in blocks(page) if (block.mark or "").startswith("no,")]
    rest = [f"{block.page}:{block.line}: {block.mark.partition(', ')[2]}" for block in found]
    with capsys.disabled():
        print("\n   not walked:" + "".join(f"\n   {line}" for line in rest))
    assert all(not line.endswith(": ") for line in rest)


def test_a_page_that_is_wrong_fails(tmp_path):
    """The walk notices a command that fails, in whatever place, and a server that ends."""
    if reason := can_walk():
        pytest.skip(reason)
    cases = {
        "true\nfalse\ntrue": 1,
        "false | true": 1,
        "export A=1\ntest $A = 1": 0,
        "test -f /dev/dax0.0 -a ! -e /dev/shm/kv": 0,
        "cxlctl info": None,
    }
    for number, (text, expected) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = walk("page", [Block("page", 1, text, "machine")], Given(), folder)
        assert done.returncode == expected if expected is not None else done.returncode, (text, done.stderr)
    for port in (None, 9):
        folder = tmp_path / f"ended-{port}"
        folder.mkdir()
        done = walk("page", [Block("page", 1, "sh -c 'exit 3'", "machine")], Given(lasting={"sh": port}), folder)
        assert done.returncode == 1


PAGE = """
Text.

<!-- walk: machine -->
    one
    two

- a list

    of two paragraphs

<!-- walk: no, a GPU -->

```sh
three
```

    four
"""


def test_blocks_and_their_marks_are_read():
    found = blocks("p.md", PAGE)
    assert [(block.text, block.mark) for block in found] == [("one\ntwo", "machine"), ("three", "no, a GPU"), ("four", None)]
    marks = (None, "maschine", "make test", "make tset", "no,", "from examples/none")
    says = [problem(Block("p.md", 1, "", mark), {"test"}) for mark in marks]
    assert [bool(each) for each in says] == [True, True, False, True, True, True]
