"""A figure of matplotlib's in half the bytes: the same marks drawn in the same order.

matplotlib gives each mark the style that it would inherit, each text two groups and each path
absolute coordinates. `lean` leaves out what is inherited and what draws nothing, joins groups that
differ in nothing, and writes a path relative to where it is.
"""

from __future__ import annotations

import re
from itertools import groupby
from xml.etree import ElementTree

SPACE = "http://www.w3.org/2000/svg"
GROUPED = ("clip-path", "style")
LETTERS = 8
"""Parts of a hundredth of the font's size, to which the outlines of letters are rounded: one of 11
points is then off by less than a hundredth of a pixel."""
NUMBER = r"-?\d*\.?\d+(?:e-?\d+)?"
MOVED = re.compile(rf"translate\(({NUMBER}) ({NUMBER})\) ?(.*)")
SIZED = re.compile(rf" ?scale\(({NUMBER}) -\1\)")
"""What turns letters, whose outlines are drawn upwards; `lean` turns the outlines."""
TRANSLATED = re.compile(r"translate\(([^)]*)\)")


def lean(drawn: str) -> str:
    """The elements inside an SVG of matplotlib's whose `fill` is currentColor, shorter.

    Coordinates are kept to a hundredth of a point. What matplotlib's style sheet says of all
    elements stands at the one group around them.
    """
    root = ElementTree.fromstring(f'<svg xmlns="{SPACE}">{drawn}</svg>')
    for each in root.iter():
        each.tag = each.tag.rpartition("}")[2]
    defined = ElementTree.Element("defs")
    for above in list(root.iter()):
        for defs in above.findall("defs"):
            defined.extend(each for each in defs if each.tag != "style")
            above.remove(defs)
    spaces = {
        f"#{each.get('id')}" for each in defined if each.tag == "path" and "d" not in each.attrib
    }
    for above in list(root.iter()):
        above[:] = [each for each in above if each.get("href") not in spaces]
    defined[:] = [each for each in defined if f"#{each.get('id')}" not in spaces]
    letters = {each.get("id") for each in defined if "scale" in each.get("transform", "")}
    styles = {each.get("id"): _style(each) for each in defined}
    for each in (*defined.iter(), *root.iter()):
        _shorten(each, letters, styles)
    whole = ElementTree.Element("g", {"stroke-linejoin": "round"})
    whole.extend([*([defined] if len(defined) else []), *_joined(root, "currentColor")])
    return ElementTree.tostring(whole, encoding="unicode").replace(" />", "/>")


def _style(element) -> dict[str, str]:
    parts = (part.partition(":") for part in element.get("style", "").split(";") if part.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def _write(style: dict[str, str]) -> str:
    return ";".join(f"{name}:{value}" for name, value in style.items())


def _shorten(element, letters: set[str], styles: dict[str, dict]) -> None:
    """Shorten what one element says. letters: ids of outlines; styles: of what can be used."""
    has, style = element.attrib, _style(element)
    element.text = element.tail = None
    if element.tag == "path" and has.get("id") in letters:
        del has["transform"]
        has["d"] = path(has["d"], (LETTERS / 64, -LETTERS / 64), places=0)
    elif element.tag == "path":
        has["d"] = path(has["d"])
    elif element.tag == "use":
        style = {k: v for k, v in style.items() if k not in styles[has["href"][1:]]}
        if moved := MOVED.fullmatch(has.get("transform", "")):
            x, y = round(LETTERS * float(moved[1])), round(-LETTERS * float(moved[2]))
            del has["transform"]
            places = {name: str(at) for name, at in (("x", x), ("y", y)) if at}
            has |= {"transform": f"translate({x} {y}){moved[3]}"} if moved[3] else places
    elif element.tag == "g" and (size := SIZED.search(has.get("transform", ""))):
        smaller = f"scale({float(size[1]) / LETTERS:.6g})".replace("(0.", "(.")
        has["transform"] = has["transform"].replace(size[0], smaller)
    for name in ("x", "y", "width", "height") if element.tag != "image" else ("x", "y"):
        if name in has:
            has[name] = _number(round(100 * float(has[name])), 2)
    if "translate" in has.get("transform", ""):
        has["transform"] = TRANSLATED.sub(_rounded, has["transform"])
    has.pop("style", None)
    if style:
        has["style"] = _write(style)


def _rounded(translate: re.Match) -> str:
    return f"translate({' '.join(_number(round(100 * float(x)), 2) for x in translate[1].split())})"


def _joined(parent, fill: str) -> list:
    """What an element holds: nothing that draws nothing, no group that says nothing, neighbours of
    one group in one. fill: the colour that it inherits."""
    children = []
    for child in parent:
        style = _style(child)
        if child.tag in ("g", "use") and style.get("fill") == fill:
            del style["fill"]
            del child.attrib["style"]
            child.attrib |= {"style": _write(style)} if style else {}
        if child.tag == "g":
            child[:] = _joined(child, style.get("fill", fill))
            children += [_one_of_two(child)] if child.attrib else list(child)
        elif child.get("style") != "fill:none":
            children.append(child)
    children = [each for each in children if each.tag != "g" or len(each)]
    return _side_by_side(children)


def _side_by_side(children: list) -> list:
    """Neighbours that say the same as one group that says it."""
    found = []
    for said, some in groupby(children, _says):
        some = list(some)
        if len(some) > 1 and said:
            group = ElementTree.Element("g", dict(said))
            for each in some:
                for name, _ in said:
                    del each.attrib[name]
            group[:] = _side_by_side(
                [e for each in some for e in (each if each.tag == "g" else [each])]
            )
            some = [_one_of_two(group)]
        found += some
    return found


def _says(element) -> tuple:
    """What a group around an element can say for it."""
    if element.tag == "g":
        return tuple(element.attrib.items()) if "id" not in element.attrib else ()
    if "opacity" in _style(element):
        return ()
    return tuple((name, element.get(name)) for name in GROUPED if name in element.attrib)


def _one_of_two(group):
    """A group that alone stands in another, as one with it where that draws the same."""
    if len(group) == 1 and (inner := group[0]).tag == "g":
        moved = {"transform", "clip-path"} & {*group.attrib, *inner.attrib}
        if not group.attrib.keys() & inner.attrib.keys() and len(moved) < 2:
            inner.attrib = group.attrib | inner.attrib
            return inner
    return group


def path(d: str, scale: tuple[float, float] = (1, 1), places: int = 2) -> str:
    """A path of the commands M, L, Q, C and z, scaled across and upwards and rounded to so many
    decimal places, each point relative to the one before."""
    words = iter(re.findall(rf"[MLQCz]|{NUMBER}", d))
    at = start = (0, 0)
    text, command, letter, last = "", "M", "", ""
    for word in words:
        if word in "MLQC":
            command, word = word, next(words)
        if word == "z":
            text, letter, at = f"{text}z", "", start
            continue
        count = {"M": 2, "L": 2, "Q": 4, "C": 6}[command]
        given = [word, *(next(words) for _ in range(count - 1))]
        points = [round(float(x) * scale[k % 2] * 10**places) for k, x in enumerate(given)]
        moved = [point - at[k % 2] for k, point in enumerate(points)]
        wanted = command.lower()
        if command == "L" and 0 in moved and any(moved):
            wanted, moved = ("h", moved[:1]) if moved[0] else ("v", moved[1:])
        if wanted != letter:
            text, letter, last = text + wanted, wanted, ""
        for number in moved:
            word = _number(number, places)
            close = not last or word[0] == "-" or word[0] == "." in last
            text, last = text + word if close else f"{text} {word}", word
        at = tuple(points[-2:])
        if command == "M":
            start, command, letter = at, "L", "l"
    return text


def _number(parts: int, places: int) -> str:
    """A number of so many decimal places, given in its last place, without idle zeros."""
    if not places:
        return str(parts)
    text = f"{abs(parts) / 10**places:.{places}f}".strip("0").rstrip(".") or "0"
    return "-" * (parts < 0) + text
