"""Images from files to a network: what is read, packed and augmented, against references that handle one image at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.recipes import pixels
from outlast.training import Stream

SIZE = 24
MASK = (1 << 64) - 1


def noise(n: int = 6, height: int = 40, width: int = 32) -> torch.Tensor:
    """Batch of bytes, (n, height, width, 3)."""
    return torch.randint(0, 256, (n, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def an_image(path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    small = draw.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(small).resize((int(draw.integers(30, 70)), int(draw.integers(30, 70)))).save(path)


def a_folder(root: Path, train: int = 6, val: int = 2) -> Path:
    for number, name in enumerate(("ant", "bee", "cat")):
        for i in range(train):
            an_image(root / "train" / name / f"{i}.jpg", 100 * number + i)
        for i in range(val):
            an_image(root / "val" / name / f"{i}.png", 1000 + 100 * number + i)
    return root


def sentence(call: Callable[[], Any]) -> str:
    with pytest.raises(OutlastError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))


# ---- random numbers


def splitmix(state: int) -> int:
    """The finalizer, as its paper writes it."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_draws_are_splitmix64_of_the_index_whatever_the_batch() -> None:
    import hashlib

    indices = torch.tensor([0, 1, 7, 1_281_166, 2**40])
    key = int.from_bytes(hashlib.shake_256(b"outlast pixels 1 3 5 ").digest(8), "little")
    expected = [
        [
            (splitmix((splitmix((i * 0x9E3779B97F4A7C15 + key) & MASK) + (j + 1) * 0x9E3779B97F4A7C15) & MASK) >> 40) / 2**24
            for j in range(4)
        ]
        for i in indices.tolist()
    ]
    found = pixels.draws(3, 5, indices, 4)
    assert found.tolist() == expected
    assert torch.equal(pixels.draws(3, 5, indices[2:4], 2), found[2:4, :2]), "a function of the index, not of its place"
    others = (pixels.draws(4, 5, indices, 4), pixels.draws(3, 6, indices, 4), pixels.draws(3, 5, indices, 4, "mixup"))
    assert not any((other == found).any() for other in others)


# ---- augmentation


def test_boxes_have_the_area_and_the_shape_that_was_asked_for() -> None:
    n = 4000
    aspect = torch.tensor([0.5, 1.0, 4 / 3, 8.0]).repeat(n // 4)
    u = pixels.draws(1, 2, torch.arange(n), pixels.CROP)
    left, top, width, height = pixels.boxes(u, aspect).unbind(1)
    assert (torch.stack((left, top, 1 - left - width, 1 - top - height)) >= -1e-12).all()
    area, shape = width * height, width * aspect / height
    narrow = aspect == 8  # a third of that fits, seldom
    assert area[~narrow].min() > 0.0799
    assert area.max() <= 1
    assert shape.min() > 0.7499
    assert shape.max() < 1.3334
    square = aspect == 1
    assert area[square].mean() == pytest.approx(0.48, abs=0.02), "uniform up to where boxes stop to fit"
    assert torch.equal(pixels.boxes(u[5:9], aspect[5:9]), pixels.boxes(u, aspect)[5:9]), "bit for bit in any batch"
    assert left[narrow & (width * 8 / height > 1.333)].numel(), "the last resort is as much of the centre as fits"


def test_the_centre_is_what_resize_and_centre_crop_keep() -> None:
    found = pixels.centre(torch.tensor([4 / 3, 0.5]), share=0.5)
    torch.testing.assert_close(found[0], torch.tensor([(1 - 0.375) / 2, 0.25, 0.375, 0.5]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1], torch.tensor([0.25, 0.375, 0.5, 0.25]).double())


@pytest.mark.parametrize("size", [16, 48])
def test_a_crop_is_that_of_pillow_and_of_interpolate(size: int) -> None:
    x = noise()
    found_boxes = pixels.boxes(pixels.draws(0, 0, torch.arange(6), pixels.CROP), torch.full((6,), 0.8))
    found = pixels.crop_resize(x, found_boxes, size)
    for image, box, made in zip(x, found_boxes.tolist(), found, strict=True):
        left, right = round(box[0] * 32), round((box[0] + box[2]) * 32)
        top, bottom = round(box[1] * 40), round((box[1] + box[3]) * 40)
        part = image[top:bottom, left:right].permute(2, 0, 1)[None].float()
        exact = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
        assert (made - exact).abs().max() < 1.1
        pillow = Image.fromarray(image.numpy()[top:bottom, left:right]).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(pillow).astype(int) - made.numpy().astype(int)).max() <= 1
    assert torch.equal(pixels.crop_resize(x.permute(0, 3, 1, 2), found_boxes, size).permute(0, 2, 3, 1), found)
    mirrored = torch.arange(6) % 2 == 0
    both = pixels.crop_resize(x, found_boxes, size, mirrored)
    assert torch.equal(both, pixels.flip(found, mirrored))
    edges = (found_boxes.view(6, 2, 2).cumsum(1) * torch.tensor([32.0, 40.0]).double()).round()  # (6, 2, 2): begin, end
    products = pixels._products(x.permute(0, 3, 1, 2), edges[:, 0], edges[:, 1] - edges[:, 0], size, mirrored)
    assert (products.permute(0, 2, 3, 1).int() - both.int()).abs().max() <= 1, "what other devices compute"


def test_threads_change_no_pixel_and_torch_keeps_as_many_as_it_had() -> None:
    x = noise(32, 200, 200)
    u = pixels.draws(0, 0, torch.arange(32), pixels.CROP + 1)
    threads, made = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            cut = pixels.crop_resize(x, pixels.boxes(u[:, : pixels.CROP], torch.ones(32)), 224, mirrored=u[:, -1] < 0.5)
            made.append((cut, pixels.normalised(cut)))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, several) for one, several in zip(*made, strict=True))


@pytest.mark.parametrize("first", [True, False], ids=["channels first", "channels last"])
def test_flip_shift_cutout_and_normalised_are_what_loops_do(first: bool) -> None:
    x = noise(n=40, height=10, width=8)
    given = x.permute(0, 3, 1, 2).contiguous() if first else x
    kept = given.clone()
    u = pixels.draws(0, 0, torch.arange(40), 2)

    def last(made: torch.Tensor) -> torch.Tensor:
        return made.permute(0, 2, 3, 1) if first else made

    chosen = u[:, 0] < 0.5
    flipped = last(pixels.flip(given, chosen))
    shifted = last(pixels.shift(given, u, 3))
    seen = set()
    for i, image in enumerate(x):
        padded = F.pad(image, (0, 0, 3, 3, 3, 3))
        down, across = (int(each * 7) for each in u[i].tolist())
        seen.add(down)
        assert torch.equal(shifted[i], padded[down : down + 10, across : across + 8])
        assert torch.equal(flipped[i], image.flip(1) if chosen[i] else image)
    assert seen == set(range(7))
    cut = last(pixels.cutout(given, u, 4, fill=(1, 2, 3)))
    for i, image in enumerate(x):
        top, left = int(u[i, 0] * 10) - 2, int(u[i, 1] * 8) - 2
        expected = image.clone()
        expected[max(0, top) : top + 4, max(0, left) : left + 4] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert torch.equal(cut[i], expected)
    made = pixels.normalised(given)
    exact = (x.double() / 255 - torch.tensor(pixels.MEAN).double()) / torch.tensor(pixels.STD).double()
    torch.testing.assert_close(made.double(), exact.permute(0, 3, 1, 2), rtol=0, atol=1e-6)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pixels.normalised(given, dtype=torch.bfloat16), made.bfloat16()), "rounded once"
    assert pixels.normalised(given, memory_format=torch.contiguous_format).is_contiguous()
    assert torch.equal(given, kept)
    assert "this one is torch.float32 of shape (40, 10, 8, 3)" in sentence(lambda: pixels.flip(x.float(), chosen))


# ---- files


def augmented(dataset: Any, **more: Any) -> dict[int, torch.Tensor]:
    """Every sample of epoch 0 as a network sees it, by its index."""
    found = {}
    for batch in Stream(dataset, batch=8, microbatch=4, seed=3, **more):
        for (x, _, index, aspect), _ in batch.split():
            u = pixels.draws(3, batch.epoch, index, pixels.CROP + 1)
            x = pixels.flip(pixels.crop_resize(x, pixels.boxes(u[:, : pixels.CROP], aspect), 16), u[:, -1] < 0.5)
            found |= dict(zip(index.tolist(), pixels.normalised(x), strict=True))
    return found


def test_packed_images_are_those_of_the_folder_and_nothing_is_decoded_twice(tmp_path: Path, capfd: Any) -> None:
    source = a_folder(tmp_path / "nested" / "pictures").parent
    place = pixels.pack(source, size=SIZE, processes=1)
    assert "outlast: packed 24 images to" in capfd.readouterr().err
    packed, folder = pixels.packed(place), pixels.folder(source, size=SIZE)
    assert packed.classes == folder.classes == ["ant", "bee", "cat"]
    for part in ("train", "val"):
        for ours, theirs in zip(pixels.packed(place, part), pixels.folder(source, part, size=SIZE), strict=True):
            assert (ours.y, ours.index) == (theirs.y, theirs.index)
            np.testing.assert_array_equal(ours.x, theirs.x)
            assert ours.aspect == theirs.aspect
    ours = augmented(packed)
    assert len(ours) == 18
    for again in (augmented(folder), augmented(packed, workers=1)):
        assert all(torch.equal(ours[i], again[i]) for i in range(18)), "the same pixels whoever reads them"
    for path in source.rglob("*.jpg"):
        about = path.stat()
        path.write_bytes(bytes(about.st_size))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert pixels.pack(source, size=SIZE) == place
    assert pixels.pack(place) == place, "a prepared place is returned as it is"
    assert shard_format.verify(shard_format.read(place), shard_format.Local(Path(place))) == []


def test_a_changed_directory_is_packed_to_another_place(tmp_path: Path) -> None:
    source = a_folder(tmp_path / "pictures")
    place = pixels.pack(source, size=SIZE)
    image = source / "train" / "ant" / "0.jpg"
    kept = image.read_bytes()
    image.unlink()
    other = pixels.pack(source, size=SIZE)
    assert (len(pixels.packed(other)), len(pixels.packed(place))) == (17, 18)
    image.write_bytes(kept)
    assert pixels.pack(source, size=SIZE) == place
    assert pixels.pack(source, tmp_path / "shared", size=SIZE) == str(tmp_path / "shared")


def test_one_process_packs_and_the_others_wait(tmp_path: Path, capfd: Any) -> None:
    source = a_folder(tmp_path / "pictures", train=30)
    with ThreadPoolExecutor(3) as pool:  # locks of files know no difference between threads and processes
        places = list(pool.map(lambda _: pixels.pack(source, size=SIZE), range(3)))
    assert len(set(places)) == 1
    assert capfd.readouterr().err.count("outlast: packed 96 images") == 1


def test_a_damaged_image_is_named_or_left_out_and_another_stands_in(tmp_path: Path, capfd: Any) -> None:
    source = a_folder(tmp_path / "pictures")
    (source / "train" / "bee" / "3.jpg").write_bytes(b"\xff\xd8 no image")
    reason = sentence(lambda: pixels.pack(source, size=SIZE))
    assert reason.startswith("train/bee/3.jpg is damaged or no image (")
    assert reason.endswith("; replace it, or leave it out with --skip-bad")
    found = pixels.packed(pixels.pack(source, size=SIZE, skip_bad=True))
    assert (len(found), found.bad) == (17, 1)
    assert "left out 1 images that cannot be decoded: train/bee/3.jpg" in capfd.readouterr().err
    strict, lenient = (pixels.folder(source, size=SIZE, skip_bad=skip) for skip in (False, True))
    at = next(i for i, item in enumerate(lenient.items) if item.file == "train/bee/3.jpg")
    assert sentence(lambda: strict[at]).endswith("--skip-bad")
    stood_in, neighbour = lenient[at], lenient[(at + 1) % 18]
    assert (stood_in.index, stood_in.y) == (at, neighbour.y)
    np.testing.assert_array_equal(stood_in.x, neighbour.x)
    assert lenient.bad == ["train/bee/3.jpg"]
    assert len(augmented(lenient)) == 18
    by_processes = pixels.folder(source, size=SIZE, skip_bad=True)
    assert len(augmented(by_processes, workers=1)) == 18
    assert by_processes.bad == lenient.bad, "counted by whichever process has met it"
    assert sentence(lambda: augmented(strict, workers=1)) == reason, "without the traceback of that process"
    for path in source.rglob("*.jpg"):
        path.unlink()
    assert "3.jpg: No such file or directory; correct that" in sentence(lambda: lenient[at]), "is not damage, and not left out"


def test_grey_images_of_16_bits_are_those_of_8(tmp_path: Path) -> None:
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    for directory in ("train/a", "val/a"):
        (tmp_path / directory).mkdir(parents=True)
        Image.fromarray(grey).save(tmp_path / directory / "grey.png")
    found = pixels.folder(tmp_path)[0].x
    np.testing.assert_array_equal(found, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2))


def test_images_of_several_shapes_are_refused_whoever_reads_them(tmp_path: Path) -> None:
    for number, shape in enumerate(((20, 20), (20, 20), (30, 20))):
        for directory in ("train/a", "val/a"):
            (tmp_path / directory).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", shape).save(tmp_path / directory / f"{number}.png")
    reason = sentence(lambda: pixels.pack(tmp_path))
    folder = pixels.folder(tmp_path)
    assert sentence(lambda: [folder[i] for i in range(3)]) == reason
    assert reason.endswith("; make them equal with --stored-size, pixels a side")


def test_what_cannot_be_trained_on_is_one_sentence(tmp_path: Path) -> None:
    source = a_folder(tmp_path / "pictures")

    def refused() -> str:
        said = sentence(lambda: pixels.pack(source, size=SIZE))
        assert sentence(lambda: pixels.folder(source, size=SIZE)) == said
        assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("packed/*/*")), "nothing half-written"
        return said.replace(str(tmp_path), "TMP")

    an_image(source / "val" / "dog" / "1.png", 1)
    assert refused() == (
        "1 of 4 classes are in val and not in train (dog); both parts need the same: add images of them to train, or remove them "
        "from val"
    )
    shutil.rmtree(source / "val" / "dog")
    an_image(source / "train" / "elk" / "1.png", 1)
    assert "in train and not in val (elk)" in refused()
    shutil.rmtree(source / "train" / "elk")
    shutil.rmtree(source / "val")
    (source / "val").mkdir()
    assert refused() == "TMP/pictures/val has no images; put some there, or remove it: then a tenth of train is val"
    shutil.rmtree(source / "val")
    (tmp_path / "file").write_text("")
    assert "file/packed: File exists; correct that" in sentence(lambda: pixels.pack(source, tmp_path / "file" / "packed"))
    shutil.rmtree(source / "train")
    assert refused().startswith("TMP/pictures has no")
    assert sentence(lambda: pixels.pack(tmp_path / "none")).endswith("none does not exist; name a file or a directory")


def test_a_label_beyond_the_classes_is_refused_before_training(tmp_path: Path) -> None:
    columns = {"image": noise(3).numpy(), "label": np.array([0, 2, 1])}
    shard = shard_format.write_columns(tmp_path / "train-00000.safetensors", columns)
    made = shard_format.Manifest("images", {"train": shard_format.Part((shard,))}, source={"classes": ["a", "b"]})
    shard_format.write(tmp_path, made)
    assert sentence(lambda: pixels.packed(tmp_path)) == (
        f"{tmp_path} has label 2 in train, and labels are 0 to 1; prepare the data again, or give the right number of classes"
    )
    assert "has no part val" in sentence(lambda: pixels.packed(tmp_path, "val"))
    shard_format.write(
        tmp_path, shard_format.Manifest("text", {"train": shard_format.Part((shard,), shard.bytes // 2)}, dtype="uint16")
    )
    assert sentence(lambda: pixels.packed(tmp_path)).startswith(
        f"{tmp_path} holds text, and decoded images are needed; make them"
    )


def test_machines_that_packed_different_images_do_not_train_together(tmp_path: Path) -> None:
    class Ranks:
        def gather(self, value: Any) -> list[Any]:
            return [value, self.other]

    run: Any = Ranks()
    packed = pixels.packed(pixels.pack(a_folder(tmp_path / "pictures"), size=SIZE))
    run.other = [packed.fingerprint]
    pixels.agreed(run, packed)
    run.other = ["another"]
    assert sentence(lambda: pixels.agreed(run, packed)).startswith("rank 1 has packed other images than rank 0: ")
