"""Where Triton has no wheels (macOS, Windows): all but the kernels is imported and runs, on the CPU.

One process in which Triton cannot be imported runs every row, and so do the processes that it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: By name: code that prints something, and what is in it.
ROWS = {
    "every module but kernels": (
        """
        import importlib, pkgutil
        import gpu_align
        imported = refused = 0
        for module in pkgutil.walk_packages(gpu_align.__path__, "gpu_align."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
                imported += 1
            except ModuleNotFoundError as error:
                assert error.name.split(".")[0] == "triton", (module.name, error)
                path = module.module_finder.find_spec(module.name).origin
                source = open(path, encoding="utf-8").read()
                assert "@triton.jit" in source or "tl.constexpr" in source, module.name
                refused += 1
        print("imported" if imported > 4 * refused > 0 else (imported, refused))
        """,
        "imported",
    ),
    "drafter": (
        """
        import torch
        from gpu_align import Drafter
        sizes = dict(max_slots=2, max_context_len=64, max_prediction_len=64, vocab_size=100)
        drafter = Drafter(**sizes, num_draft_tokens=4, device="cpu")
        drafter.add(1, prediction=PREDICTION, prompt_len=0)
        token_ids, total_len = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        token_ids[1, :2] = torch.tensor(PREDICTION[:2])
        draft = drafter.propose(token_ids, total_len, torch.tensor([1]), torch.tensor([2], dtype=torch.int32))
        print(draft.token_ids.tolist(), draft.length.tolist())
        drafter.remove(1)
        """,
        "[[12, 13, 14, 15]] [4]",
    ),
    "lcs": (
        """
        import torch
        from gpu_align.ops.lcs import lcs_length
        text = torch.tensor([PREDICTION], dtype=torch.int32)
        length = torch.tensor([len(PREDICTION)], dtype=torch.int32)
        print(lcs_length(text, length, text, length))
        """,
        "[30]",
    ),
    "predictors": (
        """
        from gpu_align.predictors import InputLookupTokenPredictor, PredictedOutputTokenPredictor, PredictorLoop
        for predictor in PredictedOutputTokenPredictor(), InputLookupTokenPredictor():
            loop = PredictorLoop(predictor, num_draft_tokens=8, vocab_size=100)
            loop.start(PREDICTION, PREDICTION)
            print(sum(1 for _ in loop.follow(PREDICTION)) < len(PREDICTION))
        """,
        "True\nTrue",
    ),
    "recipes": (
        """
        from gpu_align import RecipePack
        print(type(RecipePack.load().tokenize(lambda texts: [[*text.encode()] for text in texts])).__name__)
        """,
        "Recipes",
    ),
    "simulate": (
        """
        import sys
        from gpu_align.tools import main
        open("old.py", "w").write("def area(r):\\n    return 3 * r ** 2\\n" * 9)
        open("new.py", "w").write("def area(r):\\n    return 4 * r ** 2\\n" * 9)
        sys.argv = "gpu-align simulate --before old.py --after new.py -k 8 --policy gpu_align".split()
        print(main())
        """,
        "forward passes instead of",
    ),
    "doctor": (
        """
        import sys
        from gpu_align.tools import main
        sys.argv = ["gpu-align", "doctor", "--json", "doctor.json"]
        main()
        findings = {f["what"]: f for f in __import__("json").load(open("doctor.json"))["findings"]}
        print(findings["triton"]["ok"], findings["drafting on cpu"]["ok"])
        """,
        "None True",
    ),
    "kernels are refused": (
        """
        import os
        from gpu_align import Drafter
        os.environ["TRITON_INTERPRET"] = "1"
        sizes = dict(max_slots=2, max_context_len=64, max_prediction_len=64, vocab_size=100)
        try:
            Drafter(**sizes, num_draft_tokens=4, device="cpu", backend="triton")
        except ImportError as error:
            print(error)
        """,
        "backend: expected Triton, which has wheels for Linux on x86_64 and aarch64, found none; device='cpu'",
    ),
}

RUN = """
import contextlib, io, json, sys, textwrap, traceback
said = {}
for name, code in json.load(sys.stdin).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(textwrap.dedent(code), {"PREDICTION": list(range(10, 40))})
        except BaseException:
            out.write(traceback.format_exc())
    said[name] = out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("without_triton")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    env.pop("TRITON_INTERPRET", None)
    codes = json.dumps({name: code for name, (code, _) in ROWS.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=codes,
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ROWS)
def test_all_but_kernels_runs(name: str, said: dict[str, str]) -> None:
    assert ROWS[name][1] in said[name]
