"""The toys of *Round it yourself*: their arithmetic against lowprec, in a browser, and the page as
a reader meets it, with a keyboard, on a phone and without JavaScript.

`make check-book` runs these; they need the book in book/_build/html and the system's Chromium.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from test_book import PHONE, base, browser, contrasts, look_at, phone, tab, width_beyond, window

from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.formats import BF16, FP32, bit_fields, round_to, ulp
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.publish import form, limits
from lowprec.studies import additions

__all__ = ["base", "browser", "phone", "tab", "window"]  # fixtures
pytestmark = pytest.mark.book

ROOT = Path(__file__).resolve().parent.parent
PAGE = "round_it_yourself.html"
SOURCE = (ROOT / "book" / "round_it_yourself.md").read_text()
MODES = ("nearest_even", "toward_zero", "stochastic")
SLIDERS = ("toy-first", "toy-second", "toy-rest", "toy-off", "toy-centred", "toy-angle")
SELECTS = ("toy-mode", "toy-signs", "toy-fix")


@pytest.fixture(scope="module")
def toy(browser):
    """Calls JavaScript with the toys' functions as `toy`, on a page that has nothing else."""
    page = browser.new_page()
    page.add_script_tag(path=ROOT / "book" / "_static" / "round_it_yourself.js")
    return lambda code, given=None: page.evaluate(
        f"x => {{ const toy = lowprecToy; {code} }}", given
    )


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_same(found, expected):
    """Bit for bit, also the sign of a zero; NaN equals NaN."""
    found, nan = float64(found), expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int64), expected[~nan].double().view(torch.int64))


def numbers():
    """FP32 numbers: all exponents and both signs, on BF16 numbers, halfway, and just beside."""
    g = torch.Generator().manual_seed(0)
    upper = torch.randint(2**16, (2000,), generator=g)
    upper = torch.cat([upper, torch.tensor([0, 1, 2, 0x7F, 0x80, 0x7F7F, 0x7F80])])
    upper = torch.cat([upper, upper ^ 0x8000])
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = ((upper[:, None] << 16) | lower).flatten()
    patterns = torch.cat([patterns, torch.randint(2**32, (2000,), generator=g)])
    return torch.where(patterns < 2**31, patterns, patterns - 2**32).int().view(torch.float32)


def words(count):
    g = torch.Generator().manual_seed(1)
    some = torch.randint(2**32, (count,), generator=g)
    some[: count // 4] &= 2**31  # at the edge of a tie
    return some


ROUND = "return x.map(([value, word]) => toy.roundTo(value, '%s', word));"


@pytest.mark.parametrize("mode", MODES)
def test_fp32_numbers_round_as_in_lowprec(toy, mode):
    given = numbers()
    bits = words(len(given))
    expected = round_to(given, BF16, mode, bits=bits if mode == "stochastic" else None)
    found = toy(ROUND % mode, list(zip(given.tolist(), bits.tolist(), strict=True)))
    assert len(given) > 20_000 and expected.isinf().any() and given.isnan().any()
    assert_same(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_doubles_round_once_as_in_lowprec(toy, mode):
    """Sums that FP32 does not hold: ties but for one part in 2^45, and what it has no room for."""
    ties = round_to(numbers().double(), BF16)
    ties = ties[ties.isfinite()][::4]
    ties = ties + ulp(ties, BF16) / 2
    apart = [ties, ties * (1 + 2.0**-45), ties * (1 - 2.0**-45)]
    largest = BF16.max + ulp(float64([BF16.max]), BF16).item() / 2  # from there on infinite
    ends = float64([1e300, -1e300, 1e-310, -1e-310, largest, math.nextafter(largest, 0)])
    given = torch.cat([*apart, ends])
    bits = words(len(given))
    expected = round_to(given, BF16, mode, bits=bits if mode == "stochastic" else None)
    assert_same(toy(ROUND % mode, list(zip(given.tolist(), bits.tolist(), strict=True))), expected)


def test_an_ulp_is_that_of_lowprec(toy):
    given = numbers()
    given = given[given.isfinite()].double()
    assert_same(toy("return x.map(toy.ulp);", given.tolist()), ulp(given, BF16))


def test_the_bits_are_those_that_are_stored(toy):
    given = numbers()[::20]
    given = given[~given.isnan()].tolist()
    for value, bits in zip(given, toy("return x.map(toy.bits);", given), strict=True):
        stored = bit_fields(value, FP32)
        behind = bits["kept"] + bits["round"] + bits["sticky"]
        assert (bits["sign"], bits["exponent"], behind) == stored[:3]
        assert len(bits["kept"]) == BF16.significand_bits


def test_a_sum_and_its_error_are_those_of_one_biased_addition(toy):
    g = torch.Generator().manual_seed(2)
    pair = round_to(4 * torch.randn(2, 3000, generator=g, dtype=torch.float64), BF16)
    size = torch.randn(3000, generator=g, dtype=torch.float64)
    rest = (size * ulp(pair.sum(0), BF16)).float()
    terms = torch.cat([pair, rest[None].double()])
    given = [[*each, s] for each, s in zip(pair.T.tolist(), size.tolist(), strict=True)]
    found = toy(
        """return x.map(([first, second, size]) => {
            const rest = toy.restOf(first, second, size), sum = toy.add(first, second, rest);
            return [rest, sum.fp32, toy.errorOf(sum, toy.roundTo(sum.fp32, "nearest_even"))];
        });""",
        given,
    )
    expected = (rest, additions.sum_fp32(terms), additions.sum_error(terms, BF16))
    for one, other in zip(zip(*found, strict=True), expected, strict=True):
        assert_same(one, other)


MEAN = "return toy.meanOfAllPairs(...x);"


def test_the_mean_of_all_pairs_is_that_of_one_biased_addition(toy):
    """Where all sums lie in [4, 8]; one in 128² lies below with a rest below zero."""
    values = 2 + torch.arange(128).double() / 64
    pairs = torch.cartesian_prod(values, values).T
    one = 1 / 128**2
    for size in (2.0**-10, 0.125, 0.25, 0.4375):
        errors = additions.pair_errors(BF16, size)
        for sign, kind in ((1, "positive"), (-1, "negative")):
            rest = (sign * size * ulp(pairs.sum(0), BF16))[None]
            for mode in ("nearest_even", "toward_zero"):
                mean = additions.sum_error(torch.cat([pairs, rest]), BF16, mode).mean().item()
                assert toy(MEAN, [sign * size, mode, False]) == pytest.approx(mean, abs=1e-14)
            mean = toy(MEAN, [sign * size, "nearest_even", False])
            assert mean == pytest.approx(errors[kind].mean().item(), abs=one)
            assert mean == pytest.approx(sign * (0.25 - size), abs=one)
        assert toy(MEAN, [size, "nearest_even", True]) == pytest.approx(0, abs=one)
        assert toy(MEAN, [size, "stochastic", False]) == 0
    assert toy(MEAN, [0, "nearest_even", False]) == errors["none"].mean().item() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("either", [False, True])
def test_draws_tend_to_the_mean_of_all_pairs(toy, mode, either):
    code = """const word = toy.generator(3);
        return Array.from({ length: 20000 }, () => toy.draw(...x, word));"""
    given = [0.03, mode, either]
    found = additions.bias(float64(toy(code, given)))
    assert abs(found.mean - toy(MEAN, given)) < 2 * found.half
    leans = mode == "toward_zero" or (mode == "nearest_even" and not either)
    assert (abs(found.mean) > 10 * found.half) == leans


# The row of four keys


def of_row(toy, **options):
    plain = dict(off=0, centred=0, angle=0, fix="as_rounded")
    return toy("return toy.row(x);", plain | options)


def as_attention(toy, keys):
    """q, k, v, do of a head whose one query has the toy's P and dP, and whose keys are the toy's.

    Each key has one more channel, of its own, in which the query has the logarithm of its weight.
    V is 1.3 times as large as dP, so that O is no BF16 number.
    """
    row = toy("return toy.ROW;")
    k = torch.cat([float64(keys), torch.eye(4, dtype=torch.float64)], 1)
    q = torch.cat([torch.zeros(2, dtype=torch.float64), float64(row["weights"]).log()])[None]
    v, do = torch.zeros_like(k), torch.zeros_like(q)
    v[:, 0], do[:, 0] = 1.3 * float64(row["dp"]), 1 / 1.3
    return [x[None, None] for x in (q, k, v, do)]


STATES = [
    dict(centred=centred / 100, angle=angle)
    for centred in (0, 35, 100)
    for angle in (0, 30, 90)
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=str)
def test_the_right_gradient_is_that_of_the_oracle(toy, state):
    found = of_row(toy, **state)
    q, k, v, do = as_attention(toy, found["keys"])
    t = oracle(q, k, v, do=do, causal=False, scale=1)
    torch.testing.assert_close(float64(found["dq"]), t.dq[0, 0, 0, :2])
    torch.testing.assert_close(float64(found["ds"]), t.ds[0, 0, 0])
    assert found["delta"] == pytest.approx(t.delta.item()) and found["error"] < 1e-12


@pytest.mark.parametrize("fix", ["as_rounded", "removed", "refined"])
@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_wrong_delta_does_what_it_does_in_emulated_attention(toy, state, fix):
    """δ is off since O is stored in BF16, and by fifty times that with a bias."""
    q, k, v, do = (x.float() for x in as_attention(toy, of_row(toy, **state)["keys"]))
    for bias in (0, 50, -50):
        policy = PrecisionPolicy.parse(f"ALL_FP32+o=bf16+delta_bias={bias}+row_sum={fix}")
        t = emulate(q, k, v, policy, do=do, causal=False, scale=1)
        off = (t.delta / t.delta_ref - 1).item()
        assert abs(off) > 2e-4
        found = of_row(toy, off=off, fix=fix, **state)
        assert found["rowSum"] == pytest.approx(-off * found["delta"])
        assert found["rowSum"] == pytest.approx(t.row_sum.item(), rel=1e-2)
        torch.testing.assert_close(
            float64(found["dq"]).float(), t.dq[0, 0, 0, :2], rtol=0, atol=4e-6
        )


def test_the_error_is_the_row_sum_times_the_mean_key_and_each_control_shrinks_it(toy):
    wrong = of_row(toy, off=0.02)
    moved = float64(wrong["dq"]) - float64(wrong["exact"])
    torch.testing.assert_close(moved, wrong["rowSum"] * float64(wrong["weighted"]))
    assert wrong["error"] > 0.25
    for control in ("centred", "angle"):
        values = (0, 0.5, 1) if control == "centred" else (0, 45, 90)
        errors = [of_row(toy, off=0.02, **{control: value})["error"] for value in values]
        assert errors[0] > errors[1] > errors[2] and errors[0] > 20 * errors[2]
    assert of_row(toy, off=0.02, fix="removed")["error"] < wrong["error"] / 20
    assert of_row(toy, off=0.02, fix="refined")["error"] < 1e-12


# The page


def test_the_page_is_short_and_its_words_are_those_of_a_main_page():
    without = re.sub(r"^:::\{div\}.*?^:::$", "", SOURCE, flags=re.MULTILINE | re.DOTALL)
    assert len(form.words(form.unfolded(without))) <= 300
    assert (
        max(len(form.words(s)) for s in limits.sentences([SOURCE])) <= limits.LIMITS["sentence"][0]
    )
    assert len(form.words(limits.answer_of(SOURCE.split("\n## ")[0]))) <= limits.LIMITS["answer"][0]


def test_the_static_examples_are_right(toy):
    """What readers without JavaScript are told."""
    first, second, total = re.search(r"([\d.]+) \+ ([\d.]+) = ([\d.]+) lies", SOURCE).groups()
    alone, rest, with_rest = re.search(
        r"Alone it goes to ([\d.]+), .* rest of ([\d.]+) it goes to ([\d.]+)\.", SOURCE
    ).groups()
    ties = float(first) + float(second)
    assert ties == float(total) == (float(alone) + float(with_rest)) / 2
    exact = float64([ties, ties + float(rest)])
    assert round_to(exact, BF16).tolist() == [float(alone), float(with_rest)]
    assert bit_fields(float(alone), BF16).significand.endswith("0")
    row = toy("return toy.ROW;")
    for name, values in (("P", row["weights"]), ("dP", row["dp"])):
        assert f"{name} = {', '.join(f'{x:g}' for x in values)}" in SOURCE.replace("−", "-")
    right, wrong, sums = re.search(
        r"δ = ([\d.]+)\. With δ = ([\d.]+) .* sums to −([\d.]*\d)\.", SOURCE
    ).groups()
    found = of_row(toy, off=float(wrong) / float(right) - 1)
    assert found["delta"] == float(right) and found["rowSum"] == pytest.approx(-float(sums))


@look_at([PAGE])
def test_the_toys_fit_a_phone(phone):
    phone.get_by_role("button", name="Draw").click()
    assert width_beyond(phone) <= 0
    beyond = phone.locator(".lowprec-toy").evaluate_all(
        """toys => toys.flatMap(toy => [...toy.querySelectorAll('*')].filter(e =>
            e.checkVisibility() && !e.closest('svg *')
            && e.getBoundingClientRect().right > toy.getBoundingClientRect().right - 1
        ).map(e => e.outerHTML))"""
    )
    assert beyond == []
    heights = phone.locator(".lowprec-toy :is(input, select, button)").evaluate_all(
        "all => all.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)"
    )
    assert len(heights) == 2 * len(SLIDERS) + len(SELECTS) + 2 and min(heights) >= 32


def said(tab, control):
    return tab.locator(f".lowprec-toy:has(#{control})").inner_text()


def focus_is_seen(tab):
    return tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@look_at([PAGE])
def test_a_keyboard_moves_every_control(tab):
    tab.reload()
    tab.locator("#toy-first").focus()
    reached = []
    while not reached or reached[-1] != "toy-fix":
        if tab.evaluate("document.activeElement.closest('.lowprec-toy') !== null"):
            assert focus_is_seen(tab)
            name = "document.activeElement.id || document.activeElement.className"
            reached.append(tab.evaluate(name))
        tab.keyboard.press("Tab")
    both = [each for id in SLIDERS for each in (id, f"{id}-number")]
    assert reached == [*both[:6], "toy-mode", "toy-signs", "draw", "clear", *both[6:], "toy-fix"]
    tab.locator("#toy-first").focus()
    tab.get_by_role("button", name="Draw").press("Space")
    for id in SLIDERS:
        before, value = said(tab, id), tab.locator(f"#{id}").input_value()
        tab.locator(f"#{id}").press("ArrowRight")
        moved = tab.locator(f"#{id}").input_value()
        assert float(moved) > float(value)
        assert tab.locator(f"#{id}-number").input_value() == moved and said(tab, id) != before
        tab.locator(f"#{id}-number").fill(value)
        tab.locator(f"#{id}-number").press("Enter")
        assert tab.locator(f"#{id}").input_value() == value
    for id in SELECTS:
        tab.get_by_role("button", name="Draw").press("Space")
        tab.wait_for_function("document.querySelector('.drawn').innerText.includes(' sums: ')")
        before, value = said(tab, id), tab.locator(f"#{id}").input_value()
        tab.locator(f"#{id}").press("ArrowDown")
        assert tab.locator(f"#{id}").input_value() != value and said(tab, id) != before


@look_at([PAGE])
def test_every_control_has_a_name_and_numbers_are_announced(tab):
    for control in tab.locator(".lowprec-toy :is(input, select)").all():
        named = control.evaluate("e => e.ariaLabel || e.labels[0]?.innerText")
        assert named and len(named) > 5
    assert tab.locator(".lowprec-toy [aria-live=polite]").count() == 3
    for image in tab.locator(".lowprec-toy svg").all():
        assert image.get_attribute("role") == "img" and len(image.get_attribute("aria-label")) > 20


@look_at([PAGE])
def test_a_rest_of_either_side_decides_the_halfway_case(tab):
    tab.reload()
    rest, result = tab.locator("#toy-rest-number"), tab.locator(".lowprec-toy-said strong").first
    for size, stored in (("0.03", "4.71875"), ("0", "4.6875"), ("-0.03", "4.6875")):
        rest.fill(size)
        rest.press("Enter")
        assert f"becomes {stored}:" in result.inner_text()
    tab.locator("#toy-first-number").fill("1e39")
    tab.locator("#toy-first-number").press("Enter")
    assert float(tab.locator("#toy-first-number").input_value()) == BF16.max
    assert "NaN" not in said(tab, "toy-first")


@look_at([PAGE])
def test_drawn_sums_drift_unless_the_rest_has_either_sign(tab):
    tab.reload()
    tab.emulate_media(reduced_motion="reduce")
    drawn = tab.locator(".drawn strong")
    before = tab.locator(".drawn").inner_text()
    for signs, mean in (("one", 0.22), ("either", 0)):
        tab.locator("#toy-signs").select_option(signs)
        tab.locator(".clear").click()
        assert tab.locator(".drawn").inner_text() == before
        assert tab.locator("svg .expected").count() == 0, "what will come is told too early"
        for _ in range(4):
            tab.locator(".draw").click()
        text = drawn.inner_text().replace("−", "-")
        assert text.startswith("4,000 sums")
        assert float(re.search(r"is ([+-]?[\d.]+) ulp", text)[1]) == pytest.approx(mean, abs=0.03)
    tab.emulate_media(reduced_motion="no-preference")


@look_at([PAGE])
def test_the_curve_grows_unless_motion_is_to_be_reduced(tab):
    tab.reload()
    points = """() => { document.querySelector('.draw').click();
        return document.querySelector('.lowprec-toy polyline').points.length; }"""
    assert tab.evaluate(points) < 100
    tab.wait_for_function("document.querySelector('.drawn').innerText.startsWith('1,000 sums')")
    tab.locator(".clear").click()
    tab.emulate_media(reduced_motion="reduce")
    assert tab.evaluate(points) > 400
    tab.emulate_media(reduced_motion="no-preference")


@look_at([PAGE])
def test_the_toys_are_read_in_the_light(tab):
    text = tab.locator(
        ".lowprec-toy :is(label, p, td, th, select, button, input[type=number], figcaption)"
    )
    assert min(ratio for ratio, _ in contrasts(text)) >= 4.5
    assert min(ratio for ratio, _ in contrasts(tab.locator(".lowprec-toy svg text"), "fill")) >= 4.5
    strokes = tab.locator(".lowprec-toy svg :is(.key, .mean, .right, .wrong) path")
    assert min(ratio for ratio, _ in contrasts(strokes, "stroke")) >= 3


@look_at([PAGE], theme="dark")
def test_the_toys_are_read_in_the_dark(tab):
    test_the_toys_are_read_in_the_light(tab)


def test_without_javascript_there_is_an_example(base, browser):
    with browser.new_context(java_script_enabled=False, viewport=PHONE) as context:
        page = context.new_page()
        page.goto(base + PAGE)
        examples = page.locator(".lowprec-toy").all_inner_texts()
    assert len(examples) == 2 and all("An example: " in text for text in examples)
