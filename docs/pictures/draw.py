"""Draws the pictures of the site: `python docs/pictures/draw.py` writes the .svg files beside this file.

Each has a card of its own, white or black as the reader's system is, so that it is legible on any page and in print.
"""

import json
import re
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
RESULTS = HERE.parents[1] / "benchmarks" / "results"
STYLE = """\
.card { fill: #fff; stroke: #999 } .ink { stroke: #222; fill: none; stroke-width: 1.5 } .dash { stroke-dasharray: 5 4 }
.box { fill: #fff; stroke: #222; stroke-width: 1.5 } .half { fill: #d5d9ee; stroke: #222; stroke-width: 1.5 }
.full { fill: #2d3a8c; stroke: #222; stroke-width: 1.5 } .arrow { fill: #222 }
text { fill: #111; font: 14px sans-serif } .on { fill: #fff } .small { font-size: 12px } .bold { font-weight: bold }
.code { font: 13px monospace; white-space: pre }
@media (prefers-color-scheme: dark) {
  .card { fill: #15171c; stroke: #777 } .ink { stroke: #ddd } .box { fill: #15171c; stroke: #ddd }
  .half { fill: #3a4266; stroke: #ddd } .full { fill: #b9c2f5; stroke: #ddd } .arrow { fill: #ddd }
  text { fill: #eee } .on { fill: #111 }
}"""


class Picture:
    """Shapes in the order they are drawn."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, *classes: str, anchor: str = "middle") -> None:
        kind = f' class="{" ".join(classes)}"' if classes else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "box"
    ) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {place} rx="3" class="{kind}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, *(["on"] if kind == "full" else []))

    def line(self, *points: tuple[float, float], arrow: bool = False, dash: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.shapes.append(f'<polyline points="{path}" class="ink{" dash" if dash else ""}"{end}/>')

    def svg(self) -> str:
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="6" class="card"/>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{tip}<path d="M0 0L8 4L0 8z" class="arrow"/></marker></defs>',
                card,
                *self.shapes,
                "</svg>\n",
            ]
        )


def shares() -> Picture:
    picture = Picture("The batches of an epoch, each cut into shares for three ranks", 720, 250)
    rows = [("step 1", [22, 21, 21]), ("step 2", [22, 21, 21]), ("last step", [1, 1, 0])]
    for row, (name, parts) in enumerate(rows):
        y, x = 50 + 60 * row, 110.0
        picture.text(60, y + 22, name)
        for rank, (part, kind) in enumerate(zip(parts, ("full", "half", "box"), strict=True)):
            width = 420 * part / 64 if sum(parts) == 64 else 40 * part
            if part:
                words = f"rank {rank}: {part}" if part > 1 else f"{part}"
                picture.box(x, y, width, 34, words, kind)
            x += width
        picture.text(560, y + 15, f"{sum(parts)} samples, as in the", "small", anchor="start")
        picture.text(560, y + 31, "serial script", "small", anchor="start")
    picture.text(110, 30, "the batch of one optimizer step", "bold", anchor="start")
    picture.text(210, 183, "ranks 0 and 1 have one sample each, weight 3/2;", "small", anchor="start")
    picture.text(210, 199, "rank 2 has none, and takes the step with weight 0", "small", anchor="start")
    picture.text(
        360,
        234,
        "A rank's gradient is multiplied by share × ranks / batch, so every sample counts once.",
        "small",
    )
    return picture


def exchange() -> Picture:
    picture = Picture("What the ranks exchange in the course of a run, and when", 720, 330)
    moments = [
        ("start", "rank 0's weights", "to all ranks"),
        ("each step", "gradients", "in backward"),
        ("now and then", "a digest", "of the weights"),
        ("epoch's end", "BatchNorm's", "statistics"),
        ("evaluation", "counts", "by sum, mean"),
        ("commit", "random streams", "to rank 0"),
    ]
    for rank in range(3):
        y = 95 + 60 * rank
        picture.text(20, y + 5, f"rank {rank}", anchor="start")
        picture.line((80, y), (700, y), arrow=True)
    for at, (when, what, how) in enumerate(moments):
        x = 125 + 103 * at
        picture.text(x, 40, when, "bold")
        picture.line((x, 60), (x, 232), dash=True)
        for rank in range(3):
            y = 95 + 60 * rank
            kind = "full" if rank == 0 or when not in ("start", "commit") else "half"
            picture.box(x - 12, y - 12, 24, 24, kind=kind)
        picture.text(x, 258, what, "small")
        picture.text(x, 275, how, "small")
    picture.text(360, 310, "Weights are sent once. Equal weights with equal gradients stay equal.", "small")
    return picture


def straggler() -> Picture:
    picture = Picture("A rank that computes longer makes all others wait in the exchange", 720, 240)
    for rank in range(3):
        y = 45 + 50 * rank
        picture.text(20, y + 23, f"rank {rank}", anchor="start")
        long = 250 if rank == 1 else 150
        picture.box(90, y, 130, 34, "step 1", "half")
        picture.box(220, y, 40, 34, kind="full")
        picture.box(260, y, long, 34, "step 2", "half")
        if rank != 1:
            picture.box(410, y, 100, 34, "waits", "box")
        picture.box(510, y, 40, 34, kind="full")
        picture.box(550, y, 130, 34, "step 3", "half")
    picture.text(240, 215, "exchange", "small")
    picture.text(530, 215, "exchange", "small")
    picture.text(385, 215, "rank 1 is late", "small")
    return picture


def hybrid() -> Picture:
    picture = Picture(
        "Hybrid parallelism: the model is cut within a group, the batch between the groups", 720, 260
    )
    for group in range(2):
        x = 60 + 340 * group
        picture.box(x, 45, 270, 120)
        picture.text(x + 135, 30, f"group {group}: samples {32 * group} to {32 * group + 31}", "bold")
        for part, kind in enumerate(("half", "full")):
            picture.box(x + 20 + 130 * part, 75, 100, 50, ("layers 1-4", "layers 5-8")[part], kind)
            picture.text(x + 70 + 130 * part, 148, f"device {2 * group + part}", "small")
        picture.line((x + 120, 100), (x + 150, 100), arrow=True)
    for x in (130, 260):
        picture.line((x, 165), (x, 195), (x + 340, 195), (x + 340, 165), dash=True)
    picture.text(360, 187, "gradients of equal layers", "small")
    picture.text(
        360, 235, "activations go between the devices of a group, gradients between the groups", "small"
    )
    return picture


def overlap() -> Picture:
    picture = Picture("The exchange of a bucket begins while backward computes earlier layers", 720, 230)
    picture.text(20, 72, "compute", anchor="start")
    picture.text(20, 142, "exchange", anchor="start")
    picture.box(100, 50, 150, 36, "forward", "half")
    for at, layer in enumerate((4, 3, 2, 1)):
        picture.box(250 + 80 * at, 50, 80, 36, f"layer {layer}", "box")
    picture.box(640, 50, 60, 36, "step", "half")
    for at, (words, x) in enumerate((("bucket 1: layers 4, 3", 410), ("bucket 2: layers 2, 1", 570))):
        width = 150 if at == 0 else 70
        picture.box(x, 120, width, 36, "bucket 1" if at == 0 else "bucket 2", "full")
        picture.line((x, 86), (x, 120), arrow=True)
        picture.text(x if at == 0 else x + 35, 178, words, "small", anchor="start" if at == 0 else "middle")
    picture.line((640, 120), (640, 92), arrow=True)
    picture.text(410, 36, "backward, from the last layer to the first", "small")
    picture.line((100, 205), (700, 205), arrow=True)
    picture.text(360, 222, "time", "small")
    return picture


def tree() -> Picture:
    picture = Picture("Six microbatches are added in one tree, whichever rank holds them", 720, 360)
    xs = [165 + 100 * at for at in range(6)]
    for at, x in enumerate(xs):
        picture.box(x - 22, 40, 44, 30, str(at), "half")
    picture.text(20, 60, "microbatch", "small", anchor="start")
    pairs = [(xs[0] + xs[1]) / 2, (xs[2] + xs[3]) / 2, (xs[4] + xs[5]) / 2]
    for at, x in enumerate(pairs):
        for child in (xs[2 * at], xs[2 * at + 1]):
            picture.line((child, 70), (x, 104))
        picture.box(x - 32, 104, 64, 30, f"{2 * at}+{2 * at + 1}")
    four = (pairs[0] + pairs[1]) / 2
    for x in pairs[:2]:
        picture.line((x, 134), (four, 168))
    picture.box(four - 45, 168, 90, 30, "0+1+2+3")
    total = (four + pairs[2]) / 2
    picture.line((four, 198), (total, 226))
    picture.line((pairs[2], 134), (total, 226))
    picture.box(total - 40, 226, 80, 30, "the sum", "full")
    for row, cuts in enumerate(([3, 3], [2, 2, 2])):
        y, begin = 282 + 34 * row, 0
        picture.text(20, y + 17, f"{len(cuts)} ranks", "small", anchor="start")
        for rank, count in enumerate(cuts):
            left, right = xs[begin] - 45, xs[begin + count - 1] + 45
            picture.box(left, y, right - left, 26, f"rank {rank}", "box")
            begin += count
    return picture


def recovery() -> Picture:
    picture = Picture(
        "A run is killed and continues from its last commit at another number of ranks", 720, 260
    )
    picture.text(20, 74, "first start,", "small", anchor="start")
    picture.text(20, 90, "3 ranks", "small", anchor="start")
    for step in range(1, 8):
        kind = "half" if step <= 4 else "box"
        picture.box(60 + 52 * step, 60, 52, 36, str(step), kind)
    picture.line((112 + 52 * 4, 46), (112 + 52 * 4, 112), dash=True)
    picture.text(112 + 52 * 4, 38, "commit after step 4", "small")
    picture.text(500, 74, "killed in step 8:", "small", anchor="start")
    picture.text(500, 90, "steps 5 to 7 are not kept", "small", anchor="start")
    picture.line((320, 112), (320, 160), arrow=True)
    picture.text(20, 182, "second start,", "small", anchor="start")
    picture.text(20, 198, "2 ranks", "small", anchor="start")
    for step in range(5, 12):
        picture.box(60 + 52 * step, 166, 52, 36, str(step), "half")
    picture.text(
        330,
        225,
        "steps 5 to 7 take the same samples again, from the same weights and random streams:",
        "small",
    )
    picture.text(330, 243, "in the end each sample of the epoch has counted once", "small")
    return picture


def peers() -> Picture:
    rows = json.loads((RESULTS / "peers.json").read_text())["rows"]
    picture = Picture("Seconds from the shell to the exit of each system", 720, 70 + 34 * len(rows))
    scale = 420 / max(row["seconds"] for row in rows)
    for at, row in enumerate(rows):
        y, start, end = 40 + 34 * at, scale * row["start_s"], scale * row["seconds"]
        picture.text(160, y + 17, row["system"], anchor="end")
        picture.box(170, y, start, 24, kind="half")
        picture.box(170 + start, y, end - start, 24, kind="full")
        picture.text(180 + end, y + 17, f"{row['seconds']:.1f} s", anchor="start")
    picture.text(
        170,
        25,
        "light: until the first step; dark: the other steps, validation, exit",
        "small",
        anchor="start",
    )
    picture.text(380, 55 + 34 * len(rows), "seconds from the shell to the exit", "small")
    return picture


def prediction() -> Picture:
    rows = json.loads((RESULTS / "predict.json").read_text())["rows"]
    picture = Picture("Predicted against measured times of a step", 460, 420)
    most = 1.1 * max(max(row["predicted_s"], row["measured_s"]) for row in rows)
    picture.box(70, 20, 360, 340)
    picture.line((70, 360), (430, 20), dash=True)
    for row in rows:
        x, y = 70 + 360 * row["measured_s"] / most, 360 - 340 * row["predicted_s"] / most
        picture.box(x - 4, y - 4, 8, 8, kind="full")
    picture.text(250, 400, f"measured, 0 to {1e3 * most:.0f} ms", "small")
    picture.text(80, 40, "predicted, the same scale; on the line both are equal", "small", anchor="start")
    return picture


def terminal(title: str, text: str) -> Picture:
    lines = text.rstrip("\n").splitlines()
    picture = Picture(title, 30 + 8 * max(map(len, lines)), 34 + 18 * len(lines))
    for at, line in enumerate(lines):
        picture.text(15, 32 + 18 * at, line, "code", anchor="start")
    return picture


def of_readme(command: str) -> str:
    """What README shows of a command and its output."""
    found = re.search(
        rf"^```\n(\$ {re.escape(command)}\n.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, command
    return found[1]


def pictures() -> dict[str, str]:
    """The text of every file, by its name."""
    drawn = {
        "shares": shares(),
        "exchange": exchange(),
        "overlap": overlap(),
        "straggler": straggler(),
        "peers": peers(),
        "prediction": prediction(),
        "hybrid": hybrid(),
        "tree": tree(),
        "recovery": recovery(),
        "demo": terminal("A run of make demo in a terminal", of_readme("make demo")),
        "scale": terminal("A report of samestep scale in a terminal", (HERE / "scale.txt").read_text()),
        "failure": terminal("The report of a failure in a terminal", of_readme("samestep run -n 3 train.py")),
    }
    return {f"{name}.svg": picture.svg() for name, picture in drawn.items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text)
