"""Sentences that decide nothing: what a pass key hides in. Equal in both splits."""

from __future__ import annotations

import random

_EN = (
    ("The", "This", "One", "Every", "Another"),
    ("old", "quiet", "small", "bright", "cold", "green", "tall", "slow"),
    ("river", "house", "teacher", "garden", "train", "bird", "market", "door", "letter", "boat"),
    ("stands near", "looks at", "waits behind", "comes from", "turns to", "belongs to", "passes by"),
    ("the", "a", "the next", "the last"),
    ("bridge", "field", "station", "window", "forest", "road", "school", "harbour", "hill", "lake"),
    ("in spring", "at night", "every day", "after the rain", "before noon", "without a sound", "once a year"),
)
_ZH = (
    ("一条", "那个", "这座", "每个", "另一个"),
    ("老", "安静的", "小", "明亮的", "冷清的", "绿色的", "高", "慢"),
    ("河", "房子", "老师", "花园", "火车", "鸟", "市场", "门", "信", "船"),
    ("靠近", "看着", "等在", "来自", "转向", "属于", "经过"),
    ("桥", "田野", "车站", "窗户", "森林", "路", "学校", "港口", "小山", "湖"),
    ("，在春天", "，在夜里", "，每天", "，在雨后", "，在中午以前", "，没有声音", "，一年一次"),
)


def sentence(rng: random.Random, language: str) -> str:
    """A sentence, with the space that goes before it in English."""
    if language == "zh":
        return "".join(rng.choice(words) for words in _ZH) + "。"
    return " " + " ".join(rng.choice(words) for words in _EN) + "."
