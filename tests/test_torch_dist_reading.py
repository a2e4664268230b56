"""Reading torch_dist folders: what is found, what is refused, and what inspect says; PyTorch writes the checkpoints."""

from __future__ import annotations

import json
import pickle
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import command, environment, leftovers, run
from dist_checkpoints import ARGUMENTS, BACKEND, UP, H, N, R, V, halves, read, state, write, write_save_folder

from mla_convert.errors import BadInputError, CannotError, MlaConvertError, UsageError
from mla_convert.formats.torch_dist import is_torch_dist, open_torch_dist


def split_shapes(tensors: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shapes = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items() if "kv_up" not in key}
    for layer in range(2):
        for half, width in (("k", N), ("v", V)):
            key = UP.format(layer).replace("kv_up", f"{half}_up")
            shapes[key] = ((H * width, R), torch.bfloat16)
    return shapes


def test_pytorch_reads_what_was_split(tmp_path: Path) -> None:
    tensors = write(tmp_path / "model")
    assert run("split", tmp_path / "model").returncode == 0
    found = read(tmp_path / "model-split", split_shapes(tensors))
    for key, tensor in tensors.items():
        if "kv_up" in key:
            k, v = halves(tensor)
            assert torch.equal(found[key.replace("kv_up", "k_up")], k)
            assert torch.equal(found[key.replace("kv_up", "v_up")], v)
        else:
            assert torch.equal(found[key], tensor)


def test_splitting_does_not_load_torch(tmp_path: Path) -> None:
    write(tmp_path / "model")
    script = (
        "import sys\nfrom mla_convert.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    python = command()[0].replace("mla-convert", "python")
    for words in (["split"], ["combine"]):
        source = tmp_path / ("model" if words == ["split"] else "model-split")
        done = subprocess.run(
            [python, "-c", script, *words, str(source), "-qq"],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


def test_dry_run_and_json_say_what_would_happen(tmp_path: Path) -> None:
    write(tmp_path / "model")
    dry = run("split", tmp_path / "model", "--dry-run", "--json")
    assert dry.returncode == 0
    planned = json.loads(dry.stdout)
    assert planned["dry_run"] is True
    assert not (tmp_path / "model-split").exists()
    assert leftovers(tmp_path) == []
    (new,) = planned["steps"]["rewritten"]
    assert new["name"] == "__mla_convert_0.distcp"
    assert [tensor["name"] for tensor in new["tensors"]] == [
        f"{UP.format(layer).replace('kv_up', half)}@0,0" for layer in range(2) for half in ("k_up", "v_up")
    ]
    assert [entry["name"] for entry in planned["steps"]["generated"]] == [".metadata"]
    done = json.loads(run("split", tmp_path / "model", "--json").stdout)
    assert (done["plan"], done["layout"]) == (planned["plan"], "split")
    again = json.loads(run("split", tmp_path / "model", "--json").stdout)
    assert again["already_done"] is True


def test_the_output_is_the_same_each_time(tmp_path: Path) -> None:
    write(tmp_path / "model")
    for name in ("one", "two"):
        assert run("split", tmp_path / "model", "-o", tmp_path / name).returncode == 0
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes()


def test_a_save_folder_is_read_by_its_tracker(tmp_path: Path) -> None:
    write_save_folder(tmp_path / "save", (3, 7))
    found = open_torch_dist(tmp_path / "save")
    assert found.prefix == "iter_0000007/"
    assert [other.name for other in found.others] == [
        "iter_0000007/.metadata",
        "iter_0000007/common.pt",
        "iter_0000007/metadata.json",
        "latest_checkpointed_iteration.txt",
        "progress.txt",
    ]
    assert found.warnings == ("only iter_0000007 is read; 1 other iterations stay behind",)
    assert open_torch_dist(tmp_path / "save" / "iter_0000003").prefix == ""


def test_a_release_is_an_iteration(tmp_path: Path) -> None:
    write_save_folder(tmp_path / "save", (7,), tracker="release\n")
    (tmp_path / "save" / "iter_0000007").rename(tmp_path / "save" / "release")
    assert open_torch_dist(tmp_path / "save").prefix == "release/"


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("9", "names iter_0000009, which is not there"),
        ("", "neither a number nor release"),
        ("../../etc", "neither a number nor release"),
        ("7\n8", "neither a number nor release"),
        ("1" * 50, "neither a number nor release"),
        (None, "has neither .metadata nor latest_checkpointed_iteration.txt"),
    ],
)
def test_a_tracker_that_leads_nowhere(tmp_path: Path, tracker: str | None, message: str) -> None:
    write_save_folder(tmp_path / "save", (7,), tracker)
    with pytest.raises(BadInputError, match="iteration") as caught:
        open_torch_dist(tmp_path / "save")
    assert message in caught.value.message
    assert caught.value.details == ("iter_0000007",)
    done = run("inspect", tmp_path / "save")
    assert done.returncode == 3
    assert "iter_0000007" in done.stderr


def _remove(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def _cut(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])


def _backend(value: Any) -> Any:
    def change(folder: Path) -> None:
        (folder / "metadata.json").write_text(json.dumps(value))

    return change


def _unfinished(folder: Path) -> None:
    (folder / ".metadata").rename(folder / ".metadata.tmp")


BROKEN: dict[str, tuple[Any, type[MlaConvertError], str]] = {
    "no data": (_remove("__0_0.distcp"), BadInputError, "1 of 1 files that .metadata names are missing"),
    "short data": (_cut, BadInputError, "places items up to byte"),
    "no backend": (_remove("metadata.json"), CannotError, "no metadata.json"),
    "zarr": (_backend({**BACKEND, "sharded_backend": "zarr"}), CannotError, "'zarr'"),
    "a later version": (_backend({**BACKEND, "sharded_backend_version": 2}), CannotError, "version 2"),
    "no object": (_backend([1]), CannotError, "is no object"),
    "unfinished": (_unfinished, BadInputError, "has .metadata.tmp but no .metadata"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders(tmp_path: Path, name: str) -> None:
    change, kind, message = BROKEN[name]
    write(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(kind) as caught:
        open_torch_dist(tmp_path / "model")
    assert message in caught.value.message


def test_the_older_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "save" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CannotError, match="older torch format"):
        open_torch_dist(tmp_path / "save")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert not is_torch_dist(tmp_path)
    with pytest.raises(UsageError):
        open_torch_dist(tmp_path / "absent")


def test_not_mla(tmp_path: Path) -> None:
    write(tmp_path / "model", {"decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(8, 8)})
    done = run("split", tmp_path / "model")
    assert done.returncode == 4
    assert "not an MLA checkpoint" in done.stderr


def test_dimensions_come_from_shapes_where_nothing_states_them(tmp_path: Path) -> None:
    write(tmp_path / "model", common=None)
    document = json.loads(run("inspect", tmp_path / "model", "--json").stdout)
    (group,) = document["attention"]
    assert [group[name] for name in ("heads", "nope", "rope", "v", "rank")] == [4, 8, 4, 12, 16]


def test_arguments_that_contradict_the_shapes(tmp_path: Path) -> None:
    write(tmp_path / "model", common={"args": Namespace(**{**ARGUMENTS, "v_head_dim": 8, "qk_head_dim": 12})})
    done = run("split", tmp_path / "model")
    assert done.returncode == 3
    assert "contradicts the weights" in done.stderr
    assert run("split", tmp_path / "model", "--trust-shapes").returncode == 0


def test_inspect_says_what_only_megatron_has(tmp_path: Path) -> None:
    tensors = state()
    states = {f"optimizer.state.exp_avg.{key}": tensor.float() for key, tensor in tensors.items()}
    write(tmp_path / "model", tensors | states)
    document = json.loads(run("inspect", tmp_path / "model", "--json").stdout)
    assert (document["format"], document["layout"], document["tensors"]) == ("torch_dist", "combined", 22)
    assert document["megatron"] == {
        "iteration": 7,
        "folder": None,
        "common_state": "common.pt",
        "objects": 0,
        "layers": "one tensor a layer",
        "norms": None,
        "indexer": None,
        "optimizer": {
            "bytes": sum(tensor.numel() * 4 for tensor in tensors.values()),
            "states": ["exp_avg"],
            "by_name": True,
        },
    }
    text = run("inspect", tmp_path / "model").stdout
    assert "Megatron torch_dist" in text
    assert "exp_avg" in text


def test_options_for_megatron_are_refused_elsewhere(tmp_path: Path) -> None:
    from conversions import write_checkpoint

    write_checkpoint(tmp_path / "model")
    done = run("split", tmp_path / "model", "--drop-optimizer")
    assert done.returncode == 2
    assert "torch_dist" in done.stderr


def test_what_cannot_be_done_to_it(tmp_path: Path) -> None:
    write(tmp_path / "model")
    done = run("split", tmp_path / "model", "--dequantize", "bf16")
    assert done.returncode == 4
    done = run("combine", tmp_path / "model")
    assert done.returncode == 4
    assert "nothing to combine" in done.stderr


def test_a_list_of_hashes_is_kept_in_step(tmp_path: Path) -> None:
    import hashlib

    folder = tmp_path / "model"
    write(folder)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))
    done = run("split", folder)
    assert done.returncode == 0
    assert "integrity.json does not list the new .distcp files" in done.stderr
    found = json.loads((tmp_path / "model-split" / "integrity.json").read_bytes())["files"]
    for name, digest in found.items():
        assert hashlib.sha256((tmp_path / "model-split" / name).read_bytes()).hexdigest() == digest
    assert run("combine", tmp_path / "model-split", "-o", tmp_path / "back").returncode == 0
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_a_split_that_was_changed_is_combined_by_structure(tmp_path: Path) -> None:
    """A file that is gone, or another .metadata: the original cannot come back, but every tensor does."""
    tensors = write(tmp_path / "model")
    for name in ("gone", "edited"):
        assert run("split", tmp_path / "model", "-o", tmp_path / name).returncode == 0
    (tmp_path / "gone" / "common.pt").unlink()
    path = tmp_path / "edited" / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())))  # as Megatron's own tools would write it
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    for name in ("gone", "edited"):
        done = run("combine", tmp_path / name)
        assert done.returncode == 0
        assert "combined by structure" in done.stderr
        found = read(tmp_path / f"{name}-combined", shapes)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
