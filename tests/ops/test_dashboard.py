"""What can be told of the page without a browser."""

from __future__ import annotations

import re

import pytest

from daemon.ops import dashboard

PAGE = dashboard.page().decode()
SCRIPT = PAGE.split("<script>")[1].split("</script>")[0]
STYLE = PAGE.split("<style>")[1].split("</style>")[0]
TONES = ("good", "busy", "warn", "bad", "off")


def palette(theme: str) -> dict[str, str]:
    dark, light = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6})\b", dark))
    assert colours
    if theme == "light":
        colours |= re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6})\b", light)
    return colours


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.2, 1 to 21."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (
            it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_fetched_from_elsewhere_and_nothing_makes_markup_of_data() -> None:
    assert set(re.findall(r"https?://[^\s'\"]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in STYLE
    assert "url(" not in STYLE
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in SCRIPT
    assert " style=" not in PAGE, "the policy forbids style attributes"
    assert not re.search(r"\son\w+=", PAGE), "the policy forbids attributes that are scripts"


def test_every_element_that_the_script_names_is_in_the_page() -> None:
    ids = set(re.findall(r'find\("([a-z-]+)"\)', SCRIPT))
    assert ids <= set(re.findall(r'\bid="([a-z-]+)"', PAGE))
    parts = set(re.findall(r"\bat\.([a-z]+)\b", SCRIPT)) | set(
        re.findall(r'at\["([a-z-]+)"\]', SCRIPT)
    )
    own = {"children", "append", "dataset", "title"}  # of elements that are called `at` too
    assert parts - own <= set(re.findall(r'data-at="([a-z-]+)"', PAGE))


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read(theme: str) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for what is drawn."""
    colours = palette(theme)
    texts = [("text", "page"), ("text", "panel"), ("soft", "page"), ("soft", "panel")]
    texts += [(tone, f"{tone}-ground") for tone in TONES] + [(tone, "panel") for tone in TONES]
    texts += [("text", f"{tone}-ground") for tone in TONES] + [("soft", "bad-ground")]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in texts}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    drawn = [("weights", "panel"), ("kv", "panel"), ("focus", "panel"), ("spark", "panel")]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in drawn}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 3} == {}
