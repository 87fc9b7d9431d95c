"""The native prefix index against a slow model, over random calls: same hits, same evictions, right records."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from deepinfer.core._native import KVPool, PoolExhaustedError

BLOCK, PAGE = 4, 2


def ids(*values):
    return np.array(values, dtype=np.int32)


@dataclass
class Item:
    """A block or page of the model. `rank` 0 is not in the index; 1 spare, 2 tip, 3 kept."""

    refs: int = 1
    rank: int = 0
    owner: object = None


@dataclass
class Entry:
    key: tuple
    block: Item
    pages: dict = field(default_factory=dict)


@dataclass
class Seq:
    tokens: list
    salt: int
    enabled: bool
    opened: int
    matched: int = 0
    computed: int = 0
    blocks: list = field(default_factory=list)
    pages: dict = field(default_factory=dict)  # page index -> Item
    chain: list = field(default_factory=list)  # entries of its leading blocks


class SlowIndex:
    """The same rules over dictionaries: prefixes are keys, queues are lists, nothing is hashed or linked."""

    def __init__(self, num_blocks, num_pages, window, interval):
        self.capacity = {"blocks": num_blocks, "pages": num_pages}
        self.window, self.interval = window, interval
        self.entries = {}
        self.idle = {"blocks": [], "pages": []}  # least recently used first
        self.held = {"blocks": 0, "pages": 0}
        self.evicted = {"blocks": 0, "pages": 0}

    def first_page(self, n):
        return max(0, n - self.window + 1) // PAGE

    def take(self, kind):
        if self.held[kind] + len(self.idle[kind]) == self.capacity[kind]:
            victim = next((i for i in self.idle[kind] if i.rank == 1), self.idle[kind][0])
            if kind == "blocks":
                before = len(self.entries)
                self.forget(victim.owner)
                self.evicted[kind] += before - len(self.entries)
            else:
                self.forget_page(victim)
                self.evicted[kind] += 1
        self.held[kind] += 1
        return Item()

    def hold(self, kind, item):
        if item.refs == 0:
            self.idle[kind] = [i for i in self.idle[kind] if i is not item]
            self.held[kind] += 1
        item.refs += 1
        return item

    def drop(self, kind, item):
        item.refs -= 1
        if item.refs == 0:
            self.held[kind] -= 1
            if item.rank:
                self.idle[kind].append(item)

    def free(self, kind):
        return self.capacity[kind] - self.held[kind]

    def forget(self, entry):
        for key in [k for k in self.entries if k[0] == entry.key[0] and k[1][: len(entry.key[1])] == entry.key[1]]:
            gone = self.entries.pop(key)
            for page in list(gone.pages.values()):
                self.forget_page(page)
            self.uncache("blocks", gone.block)

    def forget_page(self, page):
        page.owner.pages = {slot: p for slot, p in page.owner.pages.items() if p is not page}
        self.uncache("pages", page)

    def uncache(self, kind, item):
        item.rank, item.owner = 0, None
        self.idle[kind] = [i for i in self.idle[kind] if i is not item]

    def window_pages(self, chain):
        """Pages of the window before the end of a chain, last first; None where one is not held."""
        boundary = len(chain) * BLOCK
        places = reversed(range(self.first_page(boundary), boundary // PAGE))
        return [chain[p * PAGE // BLOCK].pages.get(p % (BLOCK // PAGE)) for p in places]

    def find(self, tokens, salt):
        chain = []
        for end in range(BLOCK, len(tokens), BLOCK):
            entry = self.entries.get((salt, tuple(tokens[:end])))
            if entry is None:
                break
            chain.append(entry)
        return chain, next((n for n in range(len(chain), 0, -1) if None not in self.window_pages(chain[:n])), 0)

    def rank_pages(self, chain, rank):
        for page in self.window_pages(chain):
            if page is not None and (page.rank == 2 if rank == 1 else page.rank < rank):
                page.rank = rank
                if page.refs == 0:
                    self.idle["pages"] = [i for i in self.idle["pages"] if i is not page] + [page]

    def open(self, seq):
        if not seq.enabled:
            return
        chain, count = self.find(seq.tokens, seq.salt)
        seq.matched = len(chain)
        seq.chain = chain[:count]
        seq.computed = count * BLOCK
        seq.blocks = [self.hold("blocks", e.block) for e in seq.chain]
        if count:
            last = seq.computed // PAGE - 1
            for back, page in enumerate(self.window_pages(seq.chain)):
                seq.pages[last - back] = self.hold("pages", page)
            self.rank_pages(seq.chain, 3)

    def is_live(self, seq):
        return all(self.entries.get(e.key) is e for e in seq.chain)

    def commit(self, seq, end):
        seq.computed = end
        full = end // BLOCK
        if seq.enabled and full > len(seq.chain):
            if not self.is_live(seq):
                seq.chain = []
            old = list(seq.chain)
            while len(seq.chain) < full:
                self.register(seq)
            if old:
                self.rank_pages(old, 1)
            self.rank_pages(seq.chain, 2)
        for place in [p for p in sorted(seq.pages) if p < self.first_page(end)]:
            self.drop("pages", seq.pages.pop(place))

    def register(self, seq):
        place = len(seq.chain)
        end = (place + 1) * BLOCK
        key = (seq.salt, tuple(seq.tokens[:end]))
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, seq.blocks[place])
            entry.block.rank, entry.block.owner = 3, entry
        for slot in range(BLOCK // PAGE):
            page = seq.pages.get(place * BLOCK // PAGE + slot)
            if page is not None and slot not in entry.pages and not page.rank:
                entry.pages[slot] = page
                page.rank, page.owner = 1, entry
        seq.chain.append(entry)
        prompt_ends = [n // BLOCK * BLOCK for n in (seq.opened, seq.opened - 1)]
        if end % self.interval == 0 or end in prompt_ends or end == seq.matched * BLOCK:
            self.rank_pages(seq.chain, 3)

    def release(self, seq):
        for kind, items in (("blocks", seq.blocks), ("pages", [p for _, p in sorted(seq.pages.items())])):
            for item in reversed(items):
                self.drop(kind, item)
        if self.is_live(seq):
            for entry in reversed(seq.chain):
                if entry.block.refs == 0:
                    self.idle["blocks"] = [i for i in self.idle["blocks"] if i is not entry.block] + [entry.block]
        seq.blocks, seq.pages, seq.chain, seq.computed = [], {}, [], 0

    def reserve(self, seq, end):
        blocks = range(len(seq.blocks), -(-end // BLOCK))
        begin = max(seq.pages) + 1 if seq.pages else seq.computed // PAGE
        pages = range(begin, -(-end // PAGE))
        if len(blocks) > self.free("blocks") or len(pages) > self.free("pages"):
            return False
        seq.blocks += [self.take("blocks") for _ in blocks]
        seq.pages |= {place: self.take("pages") for place in pages}
        return True

    def quarantine(self, seq):
        if not seq.enabled:
            return
        seq.enabled = False
        first = self.entries.get((seq.salt, tuple(seq.tokens[:BLOCK])))
        if first is not None:
            self.forget(first)

    def fork(self, seq):
        """After the pool has agreed."""
        child = Seq(list(seq.tokens), seq.salt, seq.enabled, seq.opened, seq.matched, seq.computed)
        child.chain = list(seq.chain)
        copies = [
            (kind, seq.computed // size) for kind, size in (("blocks", BLOCK), ("pages", PAGE)) if seq.computed % size
        ]
        taken = {kind: self.take(kind) for kind, _ in copies}
        child.blocks = [self.hold("blocks", b) for b in seq.blocks[: seq.computed // BLOCK]]
        child.pages = {p: self.hold("pages", i) for p, i in seq.pages.items() if p < seq.computed // PAGE}
        child.blocks += [taken["blocks"]] if "blocks" in taken else []
        child.pages |= {place: taken[kind] for kind, place in copies if kind == "pages"}
        return child


class IndexMachine(RuleBasedStateMachine):
    """Random calls to the pool and to the model, over a memory that really stores records.

    A record is the salt and the tokens up to its position, so a wrong, stale or foreign place shows as a wrong record.
    """

    seqs = Bundle("seqs")
    window, num_blocks, num_pages, interval = 3, 9, 14, 8

    def __init__(self):
        super().__init__()
        self.pool = KVPool(self.num_blocks, BLOCK, self.num_pages, PAGE, self.window, 3)
        self.pool.enable_prefix(self.interval)
        self.model = SlowIndex(self.num_blocks, self.num_pages, self.window, self.interval)
        self.live = {}
        self.texts = [[]]
        self.memory = {"block": {}, "page": {}}
        self.hit_tokens = 0

    def place(self, kind, seq, position):
        if kind == "block":
            return int(self.pool.blocks(seq)[position // BLOCK]), position % BLOCK
        return int(self.pool.pages(seq)[position // PAGE - self.pool.first_page(seq)]), position % PAGE

    def copy(self, copies):
        for kind, src, dst in copies:
            for (place_id, offset), record in list(self.memory.get(kind, {}).items()):
                if place_id == src:
                    self.memory[kind][dst, offset] = record

    @rule(target=seqs, which=st.integers(0, 40), keep=st.integers(0, 30), tail=st.lists(st.integers(0, 1), max_size=9),
          salt=st.sampled_from([0, 0, 0, 5]), enabled=st.sampled_from([True, True, True, False]))  # fmt: skip
    def open(self, which, keep, tail, salt, enabled):
        """Open something that often begins as an older text did."""
        tokens = self.texts[which % len(self.texts)][:keep] + tail
        if self.pool.num_free_slots == 0:
            with pytest.raises(PoolExhaustedError):
                self.pool.open(ids(*tokens), salt, enabled)
            return multiple()
        found, idle = self.pool.match(ids(*tokens), salt)
        free = self.pool.num_free_blocks
        seq = self.pool.open(ids(*tokens), salt, enabled)
        self.live[seq] = state = Seq(list(tokens), salt, enabled, len(tokens))
        self.model.open(state)
        if enabled:
            self.hit_tokens += found
            assert (self.pool.num_computed(seq), free - self.pool.num_free_blocks) == (found, idle)
        return seq

    @rule(seq=seqs, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, seq, tokens):
        self.pool.append(ids(seq), ids(len(tokens)), ids(*tokens))
        self.live[seq].tokens += tokens

    @rule(seq=seqs, rows=st.integers(0, 13), ahead=st.integers(0, 3))
    def step(self, seq, rows, ahead):
        state = self.live[seq]
        begin, end = state.computed, min(len(state.tokens), state.computed + rows)
        done = self.pool.reserve(seq, end + ahead)
        assert done == self.model.reserve(state, end + ahead)
        if not done:
            return
        for kind in self.memory:
            for position in range(begin, end):
                record = state.salt, tuple(state.tokens[: position + 1])
                self.memory[kind][self.place(kind, seq, position)] = record
        self.pool.commit(ids(seq), ids(end))
        self.model.commit(state, end)

    @rule(target=seqs, seq=seqs)
    def fork(self, seq):
        try:
            child, copies = self.pool.fork(seq)
        except PoolExhaustedError:
            return multiple()
        self.copy(copies)
        self.live[child] = self.model.fork(self.live[seq])
        return child

    @rule(seq=seqs)
    def quarantine(self, seq):
        self.pool.quarantine(seq)
        self.model.quarantine(self.live[seq])

    @rule(seq=consumes(seqs))
    def close(self, seq):
        self.texts.append(self.live[seq].tokens)
        self.pool.close(seq)
        self.model.release(self.live.pop(seq))

    @invariant()
    def books_balance_and_records_are_readable(self):
        self.pool.check()
        stats, model = self.pool.prefix_stats(), self.model
        assert (self.pool.num_free_blocks, self.pool.num_free_pages) == (model.free("blocks"), model.free("pages"))
        assert stats["held_blocks"] == len(model.entries)
        assert stats["held_pages"] == sum(len(entry.pages) for entry in model.entries.values())
        assert (stats["evicted_blocks"], stats["evicted_pages"]) == (model.evicted["blocks"], model.evicted["pages"])
        assert stats["hit_tokens"] == self.hit_tokens
        for salt, tokens in model.entries:
            found = self.pool.match(ids(*tokens, 9), salt)[0]
            assert found == BLOCK * model.find([*tokens, 9], salt)[1]
        for seq, state in self.live.items():
            assert self.pool.num_computed(seq) == state.computed
            record = [(state.salt, tuple(state.tokens[: n + 1])) for n in range(state.computed)]
            assert [self.memory["block"][self.place("block", seq, n)] for n in range(state.computed)] == record
            window = range(max(0, state.computed - self.window + 1), state.computed)
            assert [self.memory["page"][self.place("page", seq, n)] for n in window] == [record[n] for n in window]

    def teardown(self):
        for seq in self.live:
            self.pool.close(seq)
        self.pool.check()
        assert (self.pool.num_free_blocks, self.pool.num_free_pages) == (self.num_blocks, self.num_pages)
        self.pool.reset_prefix()
        self.pool.check()
        assert self.pool.prefix_stats()["held_pages"] == 0


class LongWindowMachine(IndexMachine):
    """A window of more than a block, and pages for little more than two sequences."""

    window, num_blocks, num_pages, interval = 7, 12, 20, 12


TestIndexMachine = IndexMachine.TestCase
TestLongWindowMachine = LongWindowMachine.TestCase
TestIndexMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
TestLongWindowMachine.settings = TestIndexMachine.settings
