"""The page of `threefold show` in headless Chromium: what it loads, keys, widths, and what moves together."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Open
from threefold.config import Config, resolve
from threefold.config.loading import config_of

pytestmark = pytest.mark.slow
TABS = ("layout", "compare", "proof")
WIDTHS = (375, 1280)


def config(**parallel: Any) -> Config:
    sections = {
        "model": {"num_layers": parallel.pop("layers", 4), "hidden_size": 32, "num_attention_heads": 4}
        | parallel.pop("model", {}),
        "data": {"path": "nowhere", "sequence_length": 16},
        "parallel": parallel,
        "train": {"global_batch_size": 64, "micro_batch_size": 4, "device": "cpu"},
    }
    return resolve(config_of(sections), vocab_size=100)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of dp 2 · tp 2 · pp 2 with all tabs, of 32 and 128 ranks, and of many stages and layers."""
    from threefold.planner.commands.show import layout_page
    from threefold.planner.layout_document import layout_document, moves, proof

    folder = tmp_path_factory.mktemp("pages")
    small = config(dp=2, tp=2, pp=2)
    document = layout_document(small)
    document["compare"] = moves(small, config(dp=4, tp=2))
    errors = {"embed.tokens.weight": 1e-16, "blocks.1.mlp.up.bias": float("inf")}
    report = {"model": "GPT", "dtype": "fp64", "steps": 3, "full": False, "tolerance": 1e-12}
    report["layouts"] = [{"layout": "dp2·tp2·pp2", "verdict": "departs", "worst_by_parameter": errors}]
    document["proof"] = proof(report, "The report", document)
    without = {"compare": None, "proof": None}
    documents = {
        "small": document,
        "thirty-two": layout_document(config(dp=8, tp=2, pp=2), traffic=False) | without,
        "wide": layout_document(config(dp=16, tp=4, pp=2, zero=1), traffic=False) | without,
        "deep": layout_document(config(dp=1, pp=8, layers=94, schedule="interleaved", stage_chunks=3), traffic=False)
        | without,
    }
    model = {"architecture": "llama", "num_experts": 64, "expert_ffn_hidden_size": 16}
    documents["experts"] = layout_document(config(dp=4, tp=2, ep=4, layers=27, model=model), traffic=False) | without
    for name, each in documents.items():
        (folder / f"{name}.html").write_text(layout_page(each))
    return {name: folder / f"{name}.html" for name in documents}


def document_in(page: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.read_text().split('id="document">')[1].split("</script>")[0])
    return found


@pytest.fixture
def opened(page: Open) -> Open:
    """Open a page, at a fragment of its address."""

    def call(path: Path, fragment: str = "", width: int = 1280, scheme: str = "light") -> Any:
        return page(f"{path.as_uri()}{fragment}", width, scheme)

    return call


def test_nothing_is_loaded_and_nothing_overflows(opened: Any, pages: dict[str, Path]) -> None:
    seen = set()
    for path in pages.values():
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                page = opened(path, width=width, scheme=scheme)
                for tab in TABS:
                    page.click(f"#tab-{tab}")
                    assert page.is_visible(f"#{tab}")
                    assert page.evaluate("document.documentElement.scrollWidth") == width, (path.name, tab)
                seen.add((scheme, page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert len({color for _, color in seen}) == len(seen) == 2


@pytest.mark.parametrize("name", ["small", "wide"])
def test_every_rank_is_reached_by_keyboard(opened: Any, pages: dict[str, Path], name: str) -> None:
    page = opened(pages[name])
    focused = "document.activeElement.dataset.rank"
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate(focused) is not None:
            break
    reached = [page.evaluate(focused)]
    ranks = [str(each["rank"]) for each in document_in(pages[name])["layout"]["ranks"]]
    while len(reached) < len(ranks):
        page.keyboard.press("ArrowRight")
        reached.append(page.evaluate(focused))
        assert page.inner_text("#traffic-note").startswith(f"of rank {reached[-1]} ")
    assert sorted(reached, key=int) == ranks
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.layer") is not None, "the ranks are one stop of the Tab key"


def test_the_scrubber_moves_ranks_layers_and_pulses(opened: Any, pages: dict[str, Path]) -> None:
    document = document_in(pages["small"])
    length = document["schedule"]["length"] * 13 / 12  # without an estimate, the end has a twelfth
    page = opened(pages["small"])
    pulsed = set()
    _, _, _, start, end = document["schedule"]["actions"][0][0]
    sends = (end + 0.1 * (end - start)) / length
    for share in (0.1, sends, 0.33, 0.6, 0.97):
        page.evaluate(f"$('scrub').value = {round(1000 * share)}; $('scrub').dispatchEvent(new Event('input'))")
        for at in document["layout"]["ranks"]:
            actions = document["schedule"]["actions"][at["pp"]]
            now = [f"{kind}{number}" for _, kind, number, start, end in actions if start <= share * length < end]
            assert page.inner_text(f".tile[data-rank='{at['rank']}'] .doing") == "".join(now)
        running = page.eval_on_selector_all(".layer.active", "each => each.map((one) => Number(one.dataset.layer))")
        working = [
            document["stages"][stage]
            for order in document["schedule"]["actions"]
            for stage, _, _, start, end in order
            if start <= share * length < end
        ]
        assert len(running) == len(working)
        for layer, stage in zip(running, working, strict=True):
            assert stage["first_layer"] <= layer < stage["end_layer"]
        pulsed |= set(
            page.eval_on_selector_all("#pulses circle", "each => each.map((one) => one.getAttribute('class'))")
        )
    assert pulsed == {"axis-tp", "axis-pp", "axis-dp"}


def test_a_weight_shows_its_shards_and_the_address_keeps_the_selection(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["small"])
    page.click(".layer[data-layer='3']")
    page.click(".weight[aria-label^='blocks.2.mlp.down.weight']")
    page.click(".tile[data-rank='7']")
    said = page.inner_text("#weight")
    assert "blocks.2.mlp.down.weight" in said
    assert "columns 0 to 63: ranks 2, 6" in said
    assert page.inner_text("#weight li.mine") == "columns 64 to 127: ranks 3, 7"
    again = opened(pages["small"], page.evaluate("location.hash"))
    assert again.inner_text("#weight") == said
    assert again.get_attribute(".tile[data-rank='7']", "aria-pressed") == "true"


def test_hovering_a_rank_draws_its_groups_and_traffic(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["small"])
    page.hover(".tile[data-rank='6']")
    lines = page.eval_on_selector_all("#wires line", "each => each.map((one) => one.getAttribute('class'))")
    assert sorted(lines) == ["axis-dp", "axis-pp", "axis-tp"]
    rows = page.eval_on_selector_all(
        "#traffic tr.axis", "each => each.map((one) => one.innerText.split('\\t').slice(0, 2))"
    )
    assert [row for row in rows if row[0].strip()] == [["tp", "6, 7"], ["pp", "4, 6"], ["dp", "2, 6"]]


def test_numbers_of_narrow_ranks_do_not_overlap(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["thirty-two"], "#time=0.3", width=375)
    over = """each => each.filter((tile) => {
        const [rank, doing] = [...tile.querySelectorAll("b, .doing")].map((one) => one.getBoundingClientRect());
        return doing.width && rank.right > doing.left && doing.right > rank.left && rank.bottom > doing.top;
    }).length"""
    assert page.eval_on_selector_all(".tile .doing", "each => each.some((one) => one.textContent)")
    assert page.eval_on_selector_all(".tile", over) == 0


def test_memory_is_drawn_on_the_scale_of_the_device(opened: Any, pages: dict[str, Path]) -> None:
    """And again, enlarged, where it takes little of it; no color of it is that of a pass."""
    memory = document_in(pages["small"])["memory"]
    page = opened(pages["small"])
    shares = """each => each.map((bar) =>
        [...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / bar.clientWidth)"""
    drawn = page.eval_on_selector_all("#memory .bar", shares)
    peaks = [sum(causes.values()) for causes in memory["stages"]]
    assert drawn[:2] == pytest.approx([peak / memory["limit"] for peak in peaks], abs=0.01)
    assert drawn[2:] == pytest.approx([peak / max(peaks) for peak in peaks], abs=0.01)
    color = "name => getComputedStyle(document.documentElement).getPropertyValue(name)"
    passes, causes = (
        {page.evaluate(color, f"--{name}") for name in names} for names in ("FBIW", list(memory["stages"][0]))
    )
    assert not passes & causes


def test_moves_and_errors_are_drawn(opened: Any, pages: dict[str, Path]) -> None:
    document = document_in(pages["small"])
    page = opened(pages["small"], "#tab=compare&target=3")
    for each in document["compare"]["ranks"]:
        page.click(f".mover[data-rank='{each['rank']}']")
        assert f"receives {each['received']:,}, drops {each['dropped']:,}" in page.inner_text("#moved-note").replace(
            " elements", ""
        )
    assert page.locator("#moved svg rect.received").count() > 0
    page.click("#tab-proof")
    assert page.inner_text(".error:last-child").split("\n")[-1] == "∞"
    assert page.locator(".error i.wrong").count() == 1


def test_many_experts_are_drawn_as_one_for_each_shard(opened: Any, pages: dict[str, Path]) -> None:
    names = [kind["name"] for kind in document_in(pages["experts"])["tensors"]]
    page = opened(pages["experts"], f"#layer=3&weight={names.index('blocks.*.mlp.experts.gate_up')}")
    assert page.inner_text("#weight code") == "blocks.2.mlp.experts.gate_up"
    assert page.locator("#weight svg rect").count() == 2 + 4 * 2
    heights = page.eval_on_selector_all(
        "#weight svg rect", "all => all.map((each) => each.getBoundingClientRect().height)"
    )
    assert min(heights) > 5
    for name in ("embed", "head"):
        assert page.eval_on_selector(f".layer[title={name}]", "each => each.scrollWidth <= each.clientWidth")
