"""Archives are opened without trusting them."""

import contextlib
import gzip
import io
import random
import stat
import struct
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygraft.registry.uploads import archives, forward
from polygraft.registry.uploads.archives import unpack
from polygraft_adapters.types import AdapterError

from .making import CONFIG, WEIGHTS, files, tar_of, zip_of

MANY = 1 << 30


def unpacked(tmp_path: Path, content: bytes, max_bytes: int = MANY) -> dict[str, bytes]:
    """What is written for an archive."""
    archive, folder = tmp_path / "archive", tmp_path / "adapter"
    archive.write_bytes(content)
    folder.mkdir()
    unpack(archive, folder, max_bytes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(tmp_path: Path, content: bytes, max_bytes: int = MANY) -> str:
    """Why an archive is refused; nothing may appear outside its folder."""
    with pytest.raises(AdapterError) as caught:
        unpacked(tmp_path, content, max_bytes)
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "adapter"}
    return str(caught.value)


def entry(name: str, mode: int = 0, **fields: Any) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def special(kind: bytes, name: str = WEIGHTS, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


@pytest.mark.parametrize("pack", [zip_of, tar_of])
@pytest.mark.parametrize("top", ["", "./", "my-adapter/", "./my adapter/", "модель/"])
def test_the_adapter_may_lie_in_one_folder(tmp_path: Path, pack: Any, top: str) -> None:
    members = {f"{top}{name}": content for name, content in files().items()}
    others = {f"{top}tokenizer/tokenizer.json": b"{}", f"{top}optimizer.pt": b"x" * 5000, "__MACOSX/._x": b""}
    assert unpacked(tmp_path, pack(members | others)) == files()


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_a_model_card_comes_along_unless_it_is_long(tmp_path: Path, pack: Any) -> None:
    assert unpacked(tmp_path, pack({"README.md": b"# hi"} | files()))["README.md"] == b"# hi"
    (tmp_path / "other").mkdir()
    assert "README.md" not in unpacked(tmp_path / "other", pack({"README.md": b"#" * 100_000} | files()))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/../../evil",
        "/etc/evil",
        "..",
        "C:\\evil",
        "C:/evil",
        "..\\evil",
        "a\\b",
        "\\\\host\\share",
        "x" * 2000,
    ],
)
def test_a_name_that_leads_out_condemns_the_archive(tmp_path: Path, pack: Any, name: str) -> None:
    assert "name" in refused(tmp_path, pack(files() | {name: b"x"}))


def test_a_nul_in_a_name_is_seen_although_readers_cut_there(tmp_path: Path) -> None:
    content = zip_of(files() | {"adapterXmodel.safetensors": b"x"}).replace(b"adapterXmodel", b"adapter\0model")
    assert "unsafe name" in refused(tmp_path, content)


def test_a_nul_in_an_extended_name(tmp_path: Path) -> None:
    info = tarfile.TarInfo("plain")
    info.pax_headers = {"path": "adapter\0model"}
    content = tar_of([(info, b"x"), *((tarfile.TarInfo(name), content) for name, content in files().items())],
                     format=tarfile.PAX_FORMAT)  # fmt: skip
    assert "unsafe name" in refused(tmp_path, content)


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.GNUTYPE_SPARSE,
        b"V",
    ],
)
@pytest.mark.parametrize("name", [WEIGHTS, "beside"])
def test_links_and_devices_in_a_tar(tmp_path: Path, kind: bytes, name: str) -> None:
    rest = [(tarfile.TarInfo(each), content) for each, content in files().items() if each != name]
    told = refused(tmp_path, tar_of([*rest, (special(kind, name, "/etc/passwd"), b"")]))
    assert "link or a device" in told or kind == b"V"


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip(tmp_path: Path, mode: int) -> None:
    members = [(entry(CONFIG), b"{}"), (entry(WEIGHTS, mode | 0o777), b"/etc/passwd")]
    assert "link or a device" in refused(tmp_path, zip_of(members))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_too_many_members(tmp_path: Path, pack: Any) -> None:
    members = {f"file-{index}": b"" for index in range(archives.MAX_MEMBERS)}
    assert "more than 1000 members" in refused(tmp_path, pack(files() | members))


def test_a_table_of_contents_that_would_fill_memory(tmp_path: Path) -> None:
    assert "table of contents" in refused(tmp_path, zip_of({f"{index:0200}": b"" for index in range(5000)}))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_more_bytes_than_an_adapter_may_have(tmp_path: Path, pack: Any) -> None:
    assert "more than 100000 bytes" in refused(tmp_path, pack(files() | {WEIGHTS: bytes(100_000)}), 100_000)


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_more_bytes_than_such_an_archive_may_hold(tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FREE_BYTES", 1 << 20)
    assert "100 times its size" in refused(tmp_path, pack(files() | {WEIGHTS: bytes(5 << 20)}))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
@pytest.mark.parametrize("first", [True, False])
def test_the_bounds_hold_for_what_nobody_reads(tmp_path: Path, pack: Any, first: bool) -> None:
    zeros = {"logs.txt": bytes(forward.FREE_BYTES)}
    bomb = pack(zeros | files() if first else files() | zeros)
    assert "100 times its size" in refused(tmp_path, bomb)
    (tmp_path / "small").mkdir()
    noise = {"optimizer.pt": random.Random(1).randbytes(100_000)}
    told = refused(tmp_path / "small", pack(noise | files() if first else files() | noise), 100_000)
    assert "more than 100000 bytes" in told


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_what_trainers_leave_beside_an_adapter_is_no_trouble_within_the_bounds(tmp_path: Path, pack: Any) -> None:
    beside = dict.fromkeys(
        (
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
            "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", ".DS_Store",
            f"._{CONFIG}", f"__MACOSX/my-adapter/._{WEIGHTS}", "checkpoint-10/optimizer.pt", "runs/events.out.1",
        ),
        random.Random(1).randbytes(50_000),
    )  # fmt: skip
    assert unpacked(tmp_path, pack({"README.md": b"# hi"} | beside | files())) == files() | {"README.md": b"# hi"}


def test_a_member_that_is_longer_than_the_table_says(tmp_path: Path) -> None:
    content = bytearray(zip_of(files()))
    at = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)  # of the weights
    content[at + 24 : at + 28] = struct.pack("<I", 10)
    assert "damaged" in refused(tmp_path, bytes(content))


def test_a_header_that_would_fill_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "x" * (2 << 20)}
    assert "header that is too long" in refused(tmp_path, tar_of([(info, b"")], format=tarfile.PAX_FORMAT))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_several_adapters_in_one_archive(tmp_path: Path, pack: Any) -> None:
    checkpoint = {f"checkpoint-5/{name}": content for name, content in files().items()}
    told = refused(tmp_path, pack(files() | checkpoint))
    assert "is there 2 times: adapter_config.json, checkpoint-5/adapter_config.json" in told
    assert "without checkpoints" in told


def test_the_same_name_twice(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = zip_of([(CONFIG, b"{}"), (CONFIG, b"{}"), (WEIGHTS, b"x")])
    assert "twice" in refused(tmp_path, content)


def test_the_same_name_twice_in_a_tar(tmp_path: Path) -> None:
    assert "twice" in refused(tmp_path, tar_of([(tarfile.TarInfo(CONFIG), b"{}")] * 2))


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_config_and_weights_in_different_folders(tmp_path: Path, pack: Any) -> None:
    assert "another folder" in refused(tmp_path, pack({f"a/{CONFIG}": b"{}", f"b/{WEIGHTS}": b"x"}))


def test_too_deep(tmp_path: Path) -> None:
    told = refused(tmp_path, zip_of({f"home/me/out/{name}": content for name, content in files().items()}))
    assert "too deep" in told


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_pickles_are_refused_by_name_and_the_hint_tells_how_to_convert(tmp_path: Path, pack: Any) -> None:
    told = refused(tmp_path, pack({CONFIG: b"{}", "adapter_model.bin": b"\x80\x04"}))
    assert "only adapter_model.bin" in told
    assert "safe_serialization=True" in told


def test_a_checkpoint_of_torch_is_a_zip_of_pickles(tmp_path: Path) -> None:
    told = refused(tmp_path, zip_of({"archive/data.pkl": b"\x80\x02", "archive/data/0": b""}))
    assert "only archive/data.pkl" in told


def test_encrypted_members(tmp_path: Path) -> None:
    content = bytearray(zip_of(files()))
    at = content.index(b"PK\x01\x02")
    content[at + 8] |= 1
    assert "encrypted" in refused(tmp_path, bytes(content))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_whose_memory_nobody_bounds(tmp_path: Path, method: int) -> None:
    assert "unusual method" in refused(tmp_path, zip_of(files(), method))


@pytest.mark.parametrize(
    "content", [b"", b"P", b"PK", b"PK\x03\x04", b"\x1f\x8b", b"Rar!\x1a\x07", b"{}", b"\0" * 1000]
)
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    assert "archive" in refused(tmp_path, content)


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_cut_short(tmp_path: Path, pack: Any) -> None:
    whole = pack(files())
    for index, end in enumerate((10, len(whole) // 2, len(whole) - 30)):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert "damaged" in refused(folder, whole[:end])


def test_a_member_whose_bytes_are_not_what_its_checksum_says(tmp_path: Path) -> None:
    content = zip_of(files(), zipfile.ZIP_STORED).replace(struct.pack("<f", 0.5), struct.pack("<f", 0.25), 1)
    assert "damaged" in refused(tmp_path, content)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_bytes_make_it_stumble(data: st.DataObject) -> None:
    """Any damage is either harmless or refused in words: it raises nothing else."""
    whole = bytearray(data.draw(st.sampled_from([zip_of(files()), _plain_tar()])))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    content = gzip.compress(whole, 1) if whole[257:262] == b"ustar" else bytes(whole)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(AdapterError):
        unpacked(Path(folder), content)


def _plain_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files().items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
