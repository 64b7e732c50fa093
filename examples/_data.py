"""The examples' data sets, read without torchvision; nothing is downloaded unless it is asked for.

    python examples/_data.py mnist fashion_mnist --root data

downloads two of them. A loader takes the folder `root` that holds the data sets, and looks for the files in the places
where their upstreams or torchvision put them; archives are read as they are. Images are uint8, as stored.

| data set        | below `root`, the first that is there                                                         |
|-----------------|-----------------------------------------------------------------------------------------------|
| `mnist`         | MNIST/raw/*-ubyte, or .gz                                                                     |
| `fashion_mnist` | FashionMNIST/raw/*-ubyte, or .gz                                                              |
| `omniglot`      | omniglot-py/omniglot28.npz, or images_{background,evaluation} as folders, or as .zip          |
| `cifar_fs`      | cifar-100-binary/{train,test}.bin, or cifar-100-binary.tar.gz, or cifar100/cifar100-sheets.zip |
| `mini_imagenet` | mini-imagenet/{train,val,test}.csv, and images below the same folder                          |

`digits` comes with scikit-learn.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gzip
import hashlib
import http.client
import io
import json
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import numpy as np
import torch
from _run import write_atomically
from PIL import Image
from torch import Tensor
from tqdm import tqdm

PARTS = ("train", "val", "test")
Split = dict[str, Tensor]  # one of PARTS -> (classes, images, ...)

# --- where it comes from ----------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A file below `root`, the address of its folder, and its md5."""

    path: str
    folder: str
    md5: str


def idx_sources(name: str, folder: str, md5s: Iterable[str]) -> list[Source]:
    return [Source(f"{name}/raw/{file}.gz", folder, md5) for file, md5 in zip(IDX_FILES, md5s, strict=True)]


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SOURCES = {
    "mnist": idx_sources(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion_mnist": idx_sources(
        "FashionMNIST",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "omniglot": [
        Source(f"omniglot-py/{part}.zip", "https://raw.githubusercontent.com/brendenlake/omniglot/master/python", md5)
        for part, md5 in (
            ("images_background", "68d2efa1b9178cc56df9314c21c6e718"),
            ("images_evaluation", "6b91aef0f799c5bb55b94e3f2daec811"),
        )
    ],
    "cifar_fs": [
        Source("cifar-100-binary.tar.gz", "https://www.cs.toronto.edu/~kriz", "03b5dce01913d631647c71ecec9e9cb8")
    ],
}
BY_HAND = """\
mini-ImageNet cannot be downloaded by a script: its images are from ImageNet, which asks for an account.
1. Get train.csv, val.csv and test.csv (columns filename, label) from
   https://github.com/twitter-research/meta-learning-lstm/tree/master/data/miniImagenet
   and put them into {folder}.
2. Get the images that they name: a copy of mini-ImageNet, or make it from ImageNet's training set (image-net.org) with
   https://github.com/yaoyao-liu/mini-imagenet-tools
   and put them into {folder}/images/<filename> or {folder}/<label>/<filename>.
   They are resized when they are read."""


def missing(name: str, root: Path, looked_for: Iterable[Path | str]) -> NoReturn:
    places = "\n".join(f"  {root / path}" for path in looked_for)
    raise SystemExit(
        f"{name} is not there, or not all of it. Looked for:\n{places}\n"
        + (
            f"To download it:\n  python {Path(__file__)} {name} --root {root}"
            if name in SOURCES
            else BY_HAND.format(folder=root / "mini-imagenet")
        )
    )


def damaged(path: Path, what: object) -> NoReturn:
    raise SystemExit(f"{path} is damaged or not the expected file; got: {what}. Delete it and get it again.")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file it was that could not be read."""
    try:
        yield
    except (EOFError, KeyError, OSError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        damaged(path, repr(error))


# --- loaders ----------------------------------------------------------------------------------------------------------


def mnist(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train images (60000, 28, 28), train labels (int64), test images (10000, 28, 28), test labels."""
    return idx_data("mnist", "MNIST", root)


def fashion_mnist(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train images (60000, 28, 28), train labels (int64), test images (10000, 28, 28), test labels."""
    return idx_data("fashion_mnist", "FashionMNIST", root)


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's images (1797, 8, 8) with values from 0 to 16, and labels (int64)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.images).to(torch.uint8), torch.from_numpy(found.target).long()


def idx_data(name: str, folder: str, root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = []
    for file in IDX_FILES:
        path = root / folder / "raw" / file
        packed = path.with_name(f"{file}.gz")
        if not path.exists() and not packed.exists():
            missing(name, root, [path.relative_to(root), packed.relative_to(root)])
        parts.append(read_idx(path if path.exists() else packed))
    train_x, train_y, test_x, test_y = parts
    for images, labels in ((train_x, train_y), (test_x, test_y)):
        if len(images) != len(labels):
            damaged(root / folder / "raw", f"{len(images)} images and {len(labels)} labels")
    return train_x, train_y.long(), test_x, test_y.long()


def read_idx(path: Path) -> Tensor:
    """Two zero bytes, the type (8: uint8), the number of dimensions, their sizes as big-endian int32, the data."""
    with reading(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        damaged(path, f"a file that starts with {content[:4]!r}")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist()
    if len(content) - start != np.prod(shape, dtype=np.int64):
        damaged(path, f"{len(content) - start} bytes for the shape {shape}")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy())


def omniglot(root: Path) -> Split:
    """Return the split of Vinyals et al. (2016), 1028, 172 and 423 characters: (characters, 20, 28, 28), ink is high.

    The 105 x 105 drawings are turned to gray and resized by Pillow's LANCZOS. Characters are in the order of the parts
    (background, evaluation), alphabets and numbers; each is one class, rotations are the script's business.
    """
    folder = root / "omniglot-py"
    ready = folder / "omniglot28.npz"
    if ready.exists():
        with reading(ready), np.load(ready) as found:
            paper, split = found["images"], found["vinyals_split"]
    else:
        drawings, splits = [], []
        for part in ("images_background", "images_evaluation"):
            unpacked, packed = folder / part, folder / f"{part}.zip"
            if not unpacked.is_dir() and not packed.exists():
                missing("omniglot", root, [p.relative_to(root) for p in (ready, unpacked, packed)])
            for alphabet, character, images in omniglot_part(unpacked, packed):
                drawings.append(images)
                splits.append(vinyals_split(part, alphabet, character))
        paper, split = np.stack(drawings), np.array(splits)
    ink = 255 - paper
    return {part: torch.from_numpy(ink[split == part]) for part in PARTS}


VINYALS_VAL = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")
VINYALS_LAST = ("Gurmukhi", "character41")  # the last character of the evaluation part that belongs to the training set


def vinyals_split(part: str, alphabet: str, character: str) -> str:
    if part == "images_background":
        return "val" if alphabet in VINYALS_VAL else "train"
    return "train" if (alphabet, character) <= VINYALS_LAST else "test"


def omniglot_part(unpacked: Path, packed: Path) -> Iterable[tuple[str, str, np.ndarray]]:
    """Yield alphabet, character and its twenty images; alphabet/character/*.png, unpacked or not."""
    where = unpacked if unpacked.is_dir() else packed
    with reading(where), contextlib.ExitStack() as stack:
        if unpacked.is_dir():
            read = {path.relative_to(unpacked).as_posix(): path.read_bytes for path in unpacked.glob("*/*/*.png")}
        else:
            archive = stack.enter_context(zipfile.ZipFile(packed))
            read = {name: functools.partial(archive.read, name) for name in archive.namelist() if name.endswith(".png")}
        classes: dict[tuple[str, ...], list[np.ndarray]] = {}
        for name in tqdm(sorted(read), desc=unpacked.name, leave=False, disable=None):
            image = Image.open(io.BytesIO(read[name]())).convert("L").resize((28, 28), Image.Resampling.LANCZOS)
            classes.setdefault(tuple(name.split("/")[-3:-1]), []).append(np.asarray(image))
    for (alphabet, character), images in classes.items():
        if len(images) != 20:
            damaged(where, f"{len(images)} drawings of {alphabet}/{character}, not 20")
        yield alphabet, character, np.stack(images)


CIFAR_FS = {  # Bertinetto et al. (2019); the other 64 classes are for training
    "val": "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle otter sea shark "
    "television tractor",
    "test": "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail sweet_pepper table "
    "telephone wardrobe whale woman worm",
}


def cifar_fs(root: Path) -> Split:
    """Return CIFAR-100 in the split of Bertinetto et al. (2019), 64, 16 and 20 classes: (classes, 600, 3, 32, 32).

    Classes are in alphabetical order. Of a class, CIFAR-100's 500 training images come first, in the order of the file;
    the sheets have them in another order than the binary files.
    """
    folder, archive, sheets = root / "cifar-100-binary", root / "cifar-100-binary.tar.gz", root / "cifar100"
    if (folder / "train.bin").exists() and (folder / "test.bin").exists():
        images, names = cifar_binary(lambda name: (folder / name).read_bytes(), folder)
    elif archive.exists():
        with reading(archive), tarfile.open(archive) as packed:
            contents = {Path(m.name).name: packed.extractfile(m).read() for m in packed if m.isfile()}  # type: ignore
        images, names = cifar_binary(contents.__getitem__, archive)
    elif (sheets / "cifar100-sheets.zip").exists():
        images, names = cifar_sheets(sheets / "cifar100-sheets.zip")
    else:
        places = (folder / "{train,test}.bin", archive, sheets / "cifar100-sheets.zip")
        missing("cifar_fs", root, [path.relative_to(root) for path in places])
    of = {name: part for part, classes in CIFAR_FS.items() for name in classes.split()}
    parts = {part: [i for i, name in enumerate(names) if of.get(name, "train") == part] for part in PARTS}
    return {part: images[classes] for part, classes in parts.items()}


def cifar_binary(read: Callable[[str], bytes], where: Path) -> tuple[Tensor, list[str]]:
    """A record is the coarse label, the fine label, and the planes R, G and B of 32 x 32 bytes."""
    names = read("fine_label_names.txt").decode().split()
    parts = []
    for file in ("train.bin", "test.bin"):
        records = torch.frombuffer(bytearray(read(file)), dtype=torch.uint8)
        if records.numel() % (3074 * 100):
            damaged(where, f"{file} of {records.numel()} bytes, not a multiple of 3074 bytes for each of 100 classes")
        records = records.view(-1, 3074)
        counts = torch.bincount(records[:, 1], minlength=100)
        if len(names) != 100 or counts.min() != counts.max():
            damaged(where, f"{file} with {counts.min()} to {counts.max()} images a class, and {len(names)} names")
        order = records[:, 1].argsort(stable=True)
        parts.append(records[order, 2:].view(100, -1, 3, 32, 32))
    return torch.cat(parts, dim=1), names


def cifar_sheets(path: Path) -> tuple[Tensor, list[str]]:
    """A sheet per class, 30 rows of 20 images; index.json has the names."""
    with reading(path), zipfile.ZipFile(path) as archive:
        entries = sorted(json.loads(archive.read("index.json"))["classes"], key=lambda entry: entry["fine_label"])
        images = torch.empty(len(entries), 600, 3, 32, 32, dtype=torch.uint8)
        for number, entry in enumerate(tqdm(entries, desc="CIFAR-100", leave=False, disable=None)):
            sheet = np.asarray(Image.open(io.BytesIO(archive.read(f"sheets/{entry['name']}.webp"))).convert("RGB"))
            tiles = torch.from_numpy(sheet.copy()).view(30, 32, 20, 32, 3)
            images[number] = tiles.permute(0, 2, 4, 1, 3).reshape(600, 3, 32, 32)
    return images, [entry["name"] for entry in entries]


def mini_imagenet(root: Path, size: int = 84) -> Split:
    """Return the split of Ravi and Larochelle (2017), 64, 16 and 20 classes: (classes, 600, 3, size, size).

    ``mini-imagenet/train.csv``, ``val.csv`` and ``test.csv`` have the columns filename and label. An image is looked
    for as ``images/<filename>``, ``<label>/<filename>``, ``images/<label>/<filename>``, ``<part>/<label>/<filename>``;
    it is resized to a square, as there. Classes and images are in the order of the csv file. 600 may be another number,
    the same for all classes of a part. The real set takes 1.3 GB at size 84.
    """
    folder = root / "mini-imagenet"
    found: Split = {}
    for part in PARTS:
        table = folder / f"{part}.csv"
        if not table.exists():
            missing("mini_imagenet", root, [table.relative_to(root)])
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"filename", "label"} <= rows[0].keys():
            damaged(table, f"the columns {list(rows[0]) if rows else []}, not filename and label")
        classes: dict[str, list[Tensor]] = {}
        for row in tqdm(rows, desc=f"mini-ImageNet, {part}", leave=False, disable=None):
            name, label = row["filename"], row["label"]
            places = [folder / place / name for place in ("images", label, f"images/{label}", f"{part}/{label}")]
            path = next((place for place in places if place.exists()), None)
            if path is None:
                missing("mini_imagenet", root, [place.relative_to(root) for place in places])
            with reading(path), Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.LANCZOS))
            classes.setdefault(label, []).append(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        counts = {label: len(images) for label, images in classes.items()}
        if len(set(counts.values())) > 1:
            damaged(table, f"classes of different sizes: {counts}")
        found[part] = torch.stack([torch.stack(images) for images in classes.values()])
    return found


# --- download ---------------------------------------------------------------------------------------------------------


def download(name: str, root: Path, mirror: str | None = None) -> None:
    """Fetch what is not there yet. A file appears under its name only if it is whole and has the right md5."""
    for source in SOURCES[name]:
        path = root / source.path
        url = f"{(mirror or source.folder).rstrip('/')}/{path.name}"
        if path.exists():
            found = hashlib.md5(path.read_bytes()).hexdigest()
            if found != source.md5:
                raise SystemExit(f"{path} has the md5 {found}, not {source.md5}. Delete it to download it again.")
            print(f"{path} is there")
            continue
        try:
            write_atomically(path, lambda file, url=url, md5=source.md5: fetch(url, md5, file))
        except (OSError, http.client.HTTPException) as error:  # URLError and HTTPError are OSErrors
            raise SystemExit(f"Could not download {url}; got: {error!r}. No file was written; run it again.") from error
        print(f"{path} downloaded")


def fetch(url: str, md5: str, file: IO[bytes]) -> None:
    with urllib.request.urlopen(url, timeout=60) as answer:
        length = answer.headers.get("Content-Length")
        seen, total = hashlib.md5(), 0
        with tqdm(total=int(length) if length else None, unit="B", unit_scale=True, desc=url, disable=None) as bar:
            while block := answer.read(1 << 20):
                file.write(block)
                seen.update(block)
                total += len(block)
                bar.update(len(block))
    if length and total != int(length):
        raise SystemExit(f"{url} broke off after {total} of {length} bytes. No file was written; run it again.")
    if seen.hexdigest() != md5:
        raise SystemExit(
            f"{url} has the md5 {seen.hexdigest()}, not {md5}: it is damaged, or upstream has changed it. No file was "
            "written. Try again, or choose another place with --mirror."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Download the examples' data sets, and check their md5.")
    parser.add_argument(
        "names", nargs="+", choices=[*SOURCES, "mini_imagenet"], metavar="NAME", help=", ".join(SOURCES)
    )
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder for the data (%(default)s)")
    parser.add_argument("--mirror", metavar="URL", help="take the files from URL/<file name> instead of upstream")
    args = parser.parse_args()
    if "mini_imagenet" in args.names:
        sys.exit(BY_HAND.format(folder=args.root / "mini-imagenet"))
    for name in args.names:
        download(name, args.root, args.mirror)


if __name__ == "__main__":
    main()
