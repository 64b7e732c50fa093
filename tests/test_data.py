"""The loaders of the examples' data sets, and their download, against a server that the test starts."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("tqdm")
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield importlib.import_module("_data")


# --- idx files --------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">i4").tobytes() + array.tobytes()


def small_mnist(files: tuple[str, ...]) -> dict[str, bytes]:
    """Four idx files of 12 and 4 samples, by name."""
    draw = np.random.default_rng(0)
    shapes = ((12, 28, 28), (12,), (4, 28, 28), (4,))
    return {name: idx(draw.integers(0, 10, shape, dtype=np.uint8)) for name, shape in zip(files, shapes, strict=True)}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("loader", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx(data: ModuleType, tmp_path: Path, loader: str, folder: str, packed: bool) -> None:
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    for name, content in small_mnist(data.IDX_FILES).items():
        (raw / f"{name}.gz" if packed else raw / name).write_bytes(gzip.compress(content) if packed else content)
    train_x, train_y, test_x, test_y = getattr(data, loader)(tmp_path)
    assert [tuple(part.shape) for part in (train_x, train_y, test_x, test_y)] == [
        (12, 28, 28),
        (12,),
        (4, 28, 28),
        (4,),
    ]
    assert [part.dtype for part in (train_x, train_y)] == [torch.uint8, torch.int64]
    expected = np.random.default_rng(0).integers(0, 10, (12, 28, 28), dtype=np.uint8)
    assert np.array_equal(train_x.numpy(), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(np.zeros((3, 2), np.uint8)))[:-9], "damaged"),  # cut off
        (gzip.compress(idx(np.zeros((3, 2), np.uint8))[:-1]), r"5 bytes for the shape \[3, 2\]"),
        (gzip.compress(b"\0\0\x0d\1\0\0\0\1"), "starts with"),  # floats
        (b"<html>not found</html>", "damaged"),
    ],
    ids=["cut off", "too short", "floats", "no archive"],  # by its bytes, an archive has another name every second
)
def test_idx_damaged(data: ModuleType, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message) as caught:
        data.read_idx(path)
    assert str(path) in str(caught.value) and "Delete it" in str(caught.value)


def test_idx_of_different_lengths(data: ModuleType, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in small_mnist(data.IDX_FILES).items():
        (raw / name).write_bytes(content if name != "t10k-labels-idx1-ubyte" else idx(np.zeros(3, np.uint8)))
    with pytest.raises(SystemExit, match="4 images and 3 labels"):
        data.mnist(tmp_path)


def test_digits(data: ModuleType) -> None:
    pytest.importorskip("sklearn")
    images, labels = data.digits()
    assert (tuple(images.shape), images.dtype, images.max().item()) == ((1797, 8, 8), torch.uint8, 16)
    assert labels.dtype == torch.int64 and labels.bincount().tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "omniglot", "cifar_fs"])
def test_missing_data_names_the_command(data: ModuleType, tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        getattr(data, name)(tmp_path)
    message = str(caught.value)
    assert f"{name} is not there" in message and f"  {tmp_path}/" in message
    assert f"python {ROOT / 'examples' / '_data.py'} {name} --root {tmp_path}" in message
    assert list(tmp_path.iterdir()) == []  # nothing was downloaded


def test_missing_mini_imagenet_says_what_to_do(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot be downloaded by a script") as caught:
        data.mini_imagenet(tmp_path)
    assert str(tmp_path / "mini-imagenet" / "train.csv") in str(caught.value)


# --- Omniglot ---------------------------------------------------------------------------------------------------------

CHARACTERS = [  # part, alphabet, character, and the set it belongs to
    ("images_background", "Greek", "character01", "train"),
    ("images_background", "Hebrew", "character02", "val"),
    ("images_evaluation", "Angelic", "character01", "train"),
    ("images_evaluation", "Gurmukhi", "character41", "train"),
    ("images_evaluation", "Gurmukhi", "character42", "test"),
    ("images_evaluation", "ULOG", "character26", "test"),
]


def drawings(drawn: int = 20) -> dict[str, bytes]:
    """Return PNG files by path: number i of character c is black below row 4 c + i."""
    files = {}
    for number, (part, alphabet, character, _) in enumerate(CHARACTERS):
        for each in range(drawn):
            pixels = np.ones((105, 105), bool)
            pixels[4 * number + each :] = False
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")  # 1 bit, as upstream's
            files[f"{part}/{alphabet}/{character}/{number:04d}_{each + 1:02d}.png"] = file.getvalue()
    return files


def write_omniglot(root: Path, files: dict[str, bytes], packed: bool) -> None:
    folder = root / "omniglot-py"
    folder.mkdir(parents=True)
    if packed:
        for part in ("images_background", "images_evaluation"):
            with zipfile.ZipFile(folder / f"{part}.zip", "w") as archive:
                for name, content in files.items():
                    if name.startswith(part):
                        archive.writestr(name, content)
    else:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("packed", [True, False])
def test_omniglot(data: ModuleType, tmp_path: Path, packed: bool) -> None:
    write_omniglot(tmp_path, drawings(), packed)
    found = data.omniglot(tmp_path)
    assert {part: tuple(images.shape) for part, images in found.items()} == {
        part: (sum(entry[3] == part for entry in CHARACTERS), 20, 28, 28) for part in ("train", "val", "test")
    }
    for part, images in found.items():
        numbers = [number for number, entry in enumerate(CHARACTERS) if entry[3] == part]
        ink = images.float().mean((2, 3)) / 255
        expected = torch.tensor([[1 - (4 * number + each) / 105 for each in range(20)] for number in numbers])
        assert images.dtype == torch.uint8 and (ink - expected).abs().max() < 0.01
        assert images[:, :, -1].min() == 255  # ink is high


def test_omniglot_incomplete(data: ModuleType, tmp_path: Path) -> None:
    write_omniglot(tmp_path, drawings(19), packed=False)
    with pytest.raises(SystemExit, match="19 drawings of Greek/character01, not 20"):
        data.omniglot(tmp_path)


def test_omniglot_damaged(data: ModuleType, tmp_path: Path) -> None:
    write_omniglot(tmp_path, drawings(), packed=True)
    (tmp_path / "omniglot-py" / "images_evaluation.zip").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"images_evaluation\.zip is damaged"):
        data.omniglot(tmp_path)


# --- CIFAR-FS ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar_names(data: ModuleType) -> list[str]:
    """A hundred names in alphabetical order: those of the two small sets, and 64 others."""
    named = " ".join(data.CIFAR_FS.values()).split()
    return sorted([*named, *(f"n{number:02d}" for number in range(64))])


def cifar_records(per_class: int, seed: int) -> bytes:
    """Shuffled records: of image i of class c all bytes of plane p are c + i + 50 p."""
    order = np.random.default_rng(seed).permutation(100 * per_class)
    label, image = np.arange(100).repeat(per_class), np.tile(np.arange(per_class), 100)
    planes = (label + image)[:, None] + 50 * np.arange(3).repeat(1024)
    return np.column_stack((label % 20, label, planes)).astype(np.uint8)[order].tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_fs(data: ModuleType, cifar_names: list[str], tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(cifar_records(5, 0))
    (folder / "test.bin").write_bytes(cifar_records(2, 1))
    (folder / "fine_label_names.txt").write_text("".join(f"{name}\n" for name in cifar_names))
    if packed:
        with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as archive:
            archive.add(folder, "cifar-100-binary")
        for path in folder.iterdir():
            path.unlink()
    found = data.cifar_fs(tmp_path)
    assert {part: tuple(images.shape) for part, images in found.items()} == {
        "train": (64, 7, 3, 32, 32), "val": (16, 7, 3, 32, 32), "test": (20, 7, 3, 32, 32)
    }  # fmt: skip
    for part, names in data.CIFAR_FS.items():
        for images, name in zip(found[part], names.split(), strict=True):
            label = cifar_names.index(name)
            values = images[:, :, 0, 0].long() - label - 50 * torch.arange(3)
            assert (images == images[:, :, :1, :1]).all()
            assert sorted(values[:5, 0].tolist()) == list(range(5)) and sorted(values[5:, 0].tolist()) == [0, 1]
            assert (values == values[:, :1]).all()


def test_cifar_sheets(data: ModuleType, cifar_names: list[str], tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    draw = np.random.default_rng(0)
    sheet = draw.integers(0, 256, (960, 640, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "webp", lossless=True, method=0)
    with zipfile.ZipFile(tmp_path / "cifar100" / "cifar100-sheets.zip", "w") as archive:
        entries = [{"name": name, "fine_label": number} for number, name in enumerate(cifar_names)]
        archive.writestr("index.json", json.dumps({"classes": entries[::-1]}))
        for name in cifar_names:
            archive.writestr(f"sheets/{name}.webp", file.getvalue())
    found = data.cifar_fs(tmp_path)
    assert {part: tuple(images.shape) for part, images in found.items()} == {
        "train": (64, 600, 3, 32, 32), "val": (16, 600, 3, 32, 32), "test": (20, 600, 3, 32, 32)
    }  # fmt: skip
    for number in (0, 21, 599):
        row, column = divmod(number, 20)
        tile = sheet[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        assert np.array_equal(found["test"][3, number].permute(1, 2, 0).numpy(), tile)


def test_cifar_damaged(data: ModuleType, cifar_names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(cifar_records(5, 0)[:-1])
    (folder / "test.bin").write_bytes(cifar_records(2, 1))
    (folder / "fine_label_names.txt").write_text("".join(f"{name}\n" for name in cifar_names))
    with pytest.raises(SystemExit, match=r"train\.bin of 1536999 bytes"):
        data.cifar_fs(tmp_path)


# --- mini-ImageNet ----------------------------------------------------------------------------------------------------

MINI = {"train": ("n03", "n01"), "val": ("n02",), "test": ("n04", "n05")}


def write_mini_imagenet(root: Path, place: str) -> None:
    folder = root / "mini-imagenet"
    for part, labels in MINI.items():
        lines = ["filename,label"]
        for label in labels:
            for number in range(3):
                name = f"{label}{number:08d}.png"
                path = folder / place.format(part=part, label=label) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (50 + number, 40), (int(label[1:]), 100 + number, 7)).save(path)
                lines.append(f"{name},{label}")
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("place", ["images", "{label}", "images/{label}", "{part}/{label}"])
def test_mini_imagenet(data: ModuleType, tmp_path: Path, place: str) -> None:
    write_mini_imagenet(tmp_path, place)
    found = data.mini_imagenet(tmp_path, size=12)
    assert data.mini_imagenet(tmp_path)["val"].shape == (1, 3, 3, 84, 84)
    for part, labels in MINI.items():
        assert found[part].dtype == torch.uint8 and found[part].shape == (len(labels), 3, 3, 12, 12)
        for images, label in zip(found[part], labels, strict=True):
            for number, image in enumerate(images):
                color = torch.tensor([int(label[1:]), 100 + number, 7], dtype=torch.uint8)
                assert torch.equal(image, color[:, None, None].expand(3, 12, 12))


def test_mini_imagenet_refuses(data: ModuleType, tmp_path: Path) -> None:
    write_mini_imagenet(tmp_path, "images")
    table, image = tmp_path / "mini-imagenet" / "val.csv", tmp_path / "mini-imagenet" / "images" / "n0200000001.png"
    image.rename(tmp_path / "kept")
    with pytest.raises(SystemExit, match=r"n0200000001\.png"):
        data.mini_imagenet(tmp_path, 12)
    image.write_bytes(b"no picture")
    with pytest.raises(SystemExit, match=r"n0200000001\.png is damaged"):
        data.mini_imagenet(tmp_path, 12)
    (tmp_path / "kept").replace(image)
    text = table.read_text()
    table.write_text(text + "n0400000001.png,n04\n")
    with pytest.raises(SystemExit, match=r"classes of different sizes: {'n02': 3, 'n04': 1}"):
        data.mini_imagenet(tmp_path, 12)
    table.write_text(text.replace("filename", "file"))
    with pytest.raises(SystemExit, match=r"the columns \['file', 'label'\]"):
        data.mini_imagenet(tmp_path, 12)


# --- download ---------------------------------------------------------------------------------------------------------


class Server:
    """Files by name; a name in `broken` is announced whole, and breaks off in the middle."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.broken, self.asked = dict(files), set[str](), list[str]()
        self.url = ""


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    state = Server(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            state.asked.append(name)
            if name not in state.files:
                self.send_error(404)
                return
            content = state.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if name in state.broken else content)

        def log_message(self, *args: object) -> None:
            """Be silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/some/folder"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a small MNIST, which `data.SOURCES` points at."""
    files = {f"{name}.gz": gzip.compress(content) for name, content in small_mnist(data.IDX_FILES).items()}
    with serving(files) as state:
        md5s = [hashlib.md5(files[f"{name}.gz"]).hexdigest() for name in data.IDX_FILES]
        monkeypatch.setitem(data.SOURCES, "mnist", data.idx_sources("MNIST", state.url, md5s))
        yield state


def test_download(data: ModuleType, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.download("mnist", tmp_path)
    assert server.asked == [f"{name}.gz" for name in data.IDX_FILES]
    assert sorted(path.name for path in (tmp_path / "MNIST" / "raw").iterdir()) == sorted(server.asked)
    assert [len(part) for part in data.mnist(tmp_path)] == [12, 12, 4, 4]
    assert capsys.readouterr().out.count("downloaded") == 4
    data.download("mnist", tmp_path)  # nothing more to do
    assert len(server.asked) == 4 and capsys.readouterr().out.count("is there") == 4


def test_download_corrupted(data: ModuleType, server: Server, tmp_path: Path) -> None:
    name = "t10k-images-idx3-ubyte.gz"
    good = server.files[name]
    server.files[name] = good[:50] + bytes([good[50] ^ 1]) + good[51:]  # one bit
    with pytest.raises(SystemExit, match="No file was written") as caught:
        data.download("mnist", tmp_path)
    assert hashlib.md5(server.files[name]).hexdigest() in str(caught.value)
    assert f"{server.url}/{name}" in str(caught.value) and hashlib.md5(good).hexdigest() in str(caught.value)
    left = [path.name for path in (tmp_path / "MNIST" / "raw").iterdir()]
    assert sorted(left) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]  # those before it, whole
    server.files[name] = good
    data.download("mnist", tmp_path)  # goes on where it stopped
    assert server.asked.count("train-images-idx3-ubyte.gz") == 1
    assert len(data.mnist(tmp_path)[2]) == 4


def test_download_interrupted(data: ModuleType, server: Server, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    server.broken.add(name)
    whole = len(server.files[name])
    with pytest.raises(SystemExit, match=f"broke off after {whole // 2} of {whole} bytes"):
        data.download("mnist", tmp_path)
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


def test_download_not_there(data: ModuleType, server: Server, tmp_path: Path) -> None:
    del server.files["train-images-idx3-ubyte.gz"]
    with pytest.raises(SystemExit, match=r"Could not download .*train-images-idx3-ubyte\.gz; got: .*404"):
        data.download("mnist", tmp_path)
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


def test_download_keeps_a_strange_file(data: ModuleType, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(SystemExit, match="Delete it to download it again"):
        data.download("mnist", tmp_path)
    assert path.read_bytes() == b"mine" and server.asked == []


def command(*args: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples" / "_data.py")
    return subprocess.run([sys.executable, script, *args], capture_output=True, text=True, check=False, timeout=100)


def test_download_as_a_command(data: ModuleType, tmp_path: Path) -> None:
    with serving({"cifar-100-binary.tar.gz": b"something else"}) as server:
        done = command("cifar_fs", "--root", str(tmp_path), "--mirror", server.url)
    assert done.returncode == 1 and "not 03b5dce01913d631647c71ecec9e9cb8" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []
    assert "cannot be downloaded by a script" in command("mini_imagenet", "--root", str(tmp_path)).stderr


# --- the real data ----------------------------------------------------------------------------------------------------


def test_real_mnist(data: ModuleType, real_data: Path) -> None:
    _, train_y, test_x, test_y = data.mnist(real_data)
    assert train_y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert test_x.shape == (10000, 28, 28)


def test_real_omniglot(data: ModuleType, real_data: Path, tmp_path: Path) -> None:
    """The ready file, and the drawings of two alphabets from upstream's archives: the same images, the same split."""
    ready = data.omniglot(real_data)
    assert {part: len(images) for part, images in ready.items()} == {"train": 1028, "val": 172, "test": 423}
    (tmp_path / "omniglot-py").mkdir()
    for part, alphabet in (("images_background", "Hebrew"), ("images_evaluation", "Gurmukhi")):
        with zipfile.ZipFile(real_data / "omniglot-py" / f"{part}.zip") as archive:
            names = [name for name in archive.namelist() if f"/{alphabet}/" in name]
            with zipfile.ZipFile(tmp_path / "omniglot-py" / f"{part}.zip", "w") as copy:
                for name in names:
                    copy.writestr(name, archive.read(name))
    found = data.omniglot(tmp_path)
    assert {part: len(images) for part, images in found.items()} == {"train": 41, "val": 22, "test": 4}
    assert torch.equal(found["test"], ready["test"][:4])
    assert torch.equal(found["train"], ready["train"][-41:])
    with np.load(real_data / "omniglot-py" / "omniglot28.npz") as file:
        hebrew = torch.from_numpy(255 - file["images"][file["alphabet"] == "Hebrew"])
    assert torch.equal(found["val"], hebrew)


def test_real_cifar_fs(data: ModuleType, real_data: Path) -> None:
    found = data.cifar_fs(real_data)
    assert {part: len(images) for part, images in found.items()} == {"train": 64, "val": 16, "test": 20}
    total = torch.zeros(3, dtype=torch.float64)
    for images in found.values():
        total += images[:, :500].double().sum((0, 1, 3, 4)) / 255
    mean = total / (100 * 500 * 1024)
    assert mean.tolist() == pytest.approx([0.50707516, 0.48654887, 0.44091784], abs=1e-7)  # as published


def test_real_download(data: ModuleType, real_data: Path, tmp_path: Path) -> None:
    """The md5 sums in the script are upstream's."""
    files = {path.name: path.read_bytes() for path in (real_data / "FashionMNIST" / "raw").glob("*.gz")}
    with serving(files) as server:
        done = command("fashion_mnist", "--root", str(tmp_path), "--mirror", server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("downloaded") == 4
    assert data.fashion_mnist(tmp_path)[1].bincount().tolist() == [6000] * 10
    assert os.listdir(tmp_path) == ["FashionMNIST"]
