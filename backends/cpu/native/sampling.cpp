#include "sampling.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

namespace deepinfer::cpu {

namespace {

constexpr double kMassOne = 2147483648.0;  // 2^31
constexpr i64 kSortable = 512;             // candidates that are sorted rather than counted

// Score down, then id up, as one number: greater is better.
std::uint64_t rank_of(float score, i64 id) {
    const u32 bits = bits_of(score + 0.0F);  // -0 becomes +0, which it ties with
    const u32 ascending = bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFU : 0x80000000U);
    return (static_cast<std::uint64_t>(ascending) << 32) | (0xFFFFFFFFU - static_cast<u32>(id));
}

i64 id_of(std::uint64_t rank) { return static_cast<i64>(0xFFFFFFFFU - static_cast<u32>(rank)); }

// A score that at least `count` ids reach: each of the `count` best blocks has one.
float reached_by(i64 count, RowWork& work) {
    if (count > static_cast<i64>(work.maxima.size())) return -kInf;
    work.order = work.maxima;
    std::nth_element(work.order.begin(), work.order.begin() + (count - 1), work.order.end(), std::greater<>());
    return work.order[static_cast<std::size_t>(count - 1)];
}

// List the ids with x >= threshold, x - best >= floor and x > -inf.
void list_candidates(const float* x, i64 n, float threshold, float floor, RowWork& work) {
    work.ids.resize(static_cast<std::size_t>(n));
    work.kept.resize(static_cast<std::size_t>(n));
    std::int32_t* ids = work.ids.data();
    float* kept = work.kept.data();
    const float best = work.best;
    i64 count = 0;
    for (i64 block = 0; block < num_blocks(n); ++block) {
        const float top = work.maxima[static_cast<std::size_t>(block)];
        if (!(top >= threshold && top - best >= floor)) continue;
        const i64 end = std::min(n, (block + 1) * kBlock);
        for (i64 v = block * kBlock; v < end; ++v) {
            ids[count] = static_cast<std::int32_t>(v);
            kept[count] = x[v];
            count += (x[v] >= threshold) & (x[v] - best >= floor) & (x[v] > -kInf) ? 1 : 0;
        }
    }
    work.ids.resize(static_cast<std::size_t>(count));
    work.kept.resize(static_cast<std::size_t>(count));
}

// Drop the candidates that come after a place of the ranking, in place.
void keep_through(float edge_score, std::int32_t edge_id, RowWork& work) {
    std::int32_t* ids = work.ids.data();
    float* kept = work.kept.data();
    std::size_t count = 0;
    for (std::size_t i = 0; i < work.ids.size(); ++i) {
        const float score = kept[i];
        const std::int32_t id = ids[i];
        ids[count] = id;
        kept[count] = score;
        count += (score > edge_score) | ((score == edge_score) & (id <= edge_id)) ? 1 : 0;
    }
    work.ids.resize(count);
    work.kept.resize(count);
}

// Fill `pool` with the places of candidates among which the prefix reaches `target`; returns what they have to add.
// Candidates above them are worth target minus that; the sums are exact, so it is the same however they are made.
std::int64_t narrow_pool(std::int64_t target, RowWork& work) {
    const i64 count = static_cast<i64>(work.ids.size());
    float low = -kInf, high = kInf;
    std::int64_t above = 0;
    if (count > kSortable) {
        float far = 32.0F, near = 0.0F;  // below the best score; what is farther than 32 has no mass
        for (int step = 0; step < 9; ++step) {
            const float middle = (near + far) * 0.5F;
            const float threshold = work.best - middle;
            const std::int64_t mass = mass_at_least(work.kept.data(), work.masses.data(), count, threshold);
            if (mass >= target) {
                far = middle;
                low = threshold;
            } else {
                near = middle;
                high = threshold;
                above = mass;
            }
        }
    }
    work.pool.resize(work.ids.size());
    const float* kept = work.kept.data();
    std::size_t size = 0;
    for (i64 i = 0; i < count; ++i) {
        work.pool[size] = static_cast<std::int32_t>(i);
        size += (kept[i] >= low) & (kept[i] < high) ? 1 : 0;
    }
    work.pool.resize(size);
    return target - above;
}

// Keep the shortest prefix, best first, whose mass reaches `target` >= 1; all when none does.
void keep_mass(std::int64_t target, RowWork& work) {
    // Radix selection on the score, 11 bits at a time: add the masses of each digit, walk down to the digit that holds
    // the edge, go on inside it. A pool that is small enough is sorted.
    constexpr std::array<int, 3> shifts{53, 42, 32};
    constexpr std::array<u32, 3> digit_masks{2047U, 2047U, 1023U};
    std::array<std::int64_t, 2048> sums;
    target = narrow_pool(target, work);
    std::vector<std::int32_t>& pool = work.pool;
    const auto rank = [&](std::int32_t i) { return rank_of(work.kept[i], work.ids[i]); };
    const auto same = [&](std::int32_t i) { return work.kept[i] == work.kept[pool[0]]; };
    const bool flat = std::all_of(pool.begin(), pool.end(), same);
    for (std::size_t level = 0; !flat && level < 3 && static_cast<i64>(pool.size()) > kSortable; ++level) {
        const auto digit = [&](std::int32_t i) { return (rank(i) >> shifts[level]) & digit_masks[level]; };
        sums.fill(0);
        for (const std::int32_t i : pool) sums[digit(i)] += work.masses[i];
        int edge = static_cast<int>(digit_masks[level]);
        while (edge >= 0 && target > sums[edge]) target -= sums[edge--];
        if (edge < 0) return;
        std::erase_if(pool, [&](std::int32_t i) { return digit(i) != static_cast<u32>(edge); });
    }
    // What is left of a large pool has equal scores and ascending ids: it is sorted already.
    if (!flat && static_cast<i64>(pool.size()) <= kSortable) {
        std::sort(pool.begin(), pool.end(), [&](std::int32_t a, std::int32_t b) { return rank(a) > rank(b); });
    }
    for (const std::int32_t i : pool) {
        target -= work.masses[i];
        if (target <= 0) return keep_through(work.kept[i], work.ids[i], work);
    }
}

void keep_top_k(i64 count, RowWork& work) {
    if (count >= static_cast<i64>(work.ids.size())) return;
    work.masses.assign(work.ids.size(), 1U);
    keep_mass(count, work);
}

void keep_top_p(float top_p, RowWork& work) {
    const i64 count = static_cast<i64>(work.ids.size());
    work.weights.resize(work.ids.size());
    work.masses.resize(work.ids.size());
    const double total = exp_and_sum(work.kept.data(), count, work.best, work.weights.data());
    masses_of(work.weights.data(), count, static_cast<float>(total), work.masses.data());
    const double target = std::floor(static_cast<double>(top_p) * kMassOne);
    keep_mass(std::max<std::int64_t>(1, static_cast<std::int64_t>(target)), work);
}

struct Best {
    float sum = -kInf;
    std::int32_t id = -1;

    void offer(float other, std::int32_t other_id) {
        if (other > sum || (other == sum && (id < 0 || other_id < id))) {
            sum = other;
            id = other_id;
        }
    }
};

// Offer the ids of one chunk, unless none of them can win: bounds come from the greatest score and the least word.
void offer_chunk(const float* scores, i64 n, i64 start, const DrawKey& key, Best& best) {
    const int count = static_cast<int>(std::min<i64>(kChunk, n - start));
    const float top = max_of(scores + start, count);
    if (top == -kInf || (best.id >= 0 && top + kGumbelCeiling < best.sum)) return;
    std::array<u32, kChunk / 4> quads;
    std::array<u32, kChunk> words;
    std::array<float, kChunk> sums;
    for (int i = 0; i < kChunk / 4; ++i) quads[i] = static_cast<u32>(start / 4 + i);
    philox_words(quads.data(), (count + 3) / 4, key, words.data());
    if (best.id >= 0 && top + (gumbel_f32(min_word(words.data(), count)) + kGumbelSlack) < best.sum) return;
    add_gumbels(scores + start, words.data(), count, sums.data());
    for (int i = 0; i < count; ++i) {
        if (scores[start + i] > -kInf) best.offer(sums[i], static_cast<std::int32_t>(start + i));
    }
}

std::int32_t draw_listed(const std::vector<std::int32_t>& ids, const std::vector<float>& kept, const DrawKey& key) {
    std::array<u32, kChunk> quads;
    std::array<u32, kChunk * 4> words;
    std::array<u32, kChunk> own;
    std::array<float, kChunk> sums;
    Best best;
    for (std::size_t start = 0; start < ids.size(); start += kChunk) {
        const int count = static_cast<int>(std::min<std::size_t>(kChunk, ids.size() - start));
        for (int i = 0; i < count; ++i) quads[i] = static_cast<u32>(ids[start + i]) / 4;
        philox_words(quads.data(), count, key, words.data());
        for (int i = 0; i < count; ++i) own[i] = words[4 * i + ids[start + i] % 4];
        add_gumbels(kept.data() + start, own.data(), count, sums.data());
        for (int i = 0; i < count; ++i) best.offer(sums[i], ids[start + i]);
    }
    return best.id;
}

}  // namespace

void filter_row(const float* logits, i64 n, const Filters& filters, RowWork& work) {
    const bool greedy = !(filters.temperature > 0.0F);
    work.scores = logits;
    if (!greedy && filters.temperature != 1.0F) {
        work.scaled.resize(static_cast<std::size_t>(n));
        divide_row(logits, n, filters.temperature, work.scaled.data());
        work.scores = work.scaled.data();
    }
    work.maxima.resize(static_cast<std::size_t>(num_blocks(n)));
    const bool finite = block_maxima(work.scores, n, work.maxima.data());
    work.best = max_of(work.maxima.data(), num_blocks(n));
    work.kind = !finite || work.best == -kInf ? RowKind::kUnusable : greedy ? RowKind::kGreedy : RowKind::kAll;
    const bool top_k = filters.top_k > 0 && filters.top_k < n;
    if (work.kind != RowKind::kAll || !(top_k || filters.top_p < 1.0F || filters.min_p > 0.0F)) return;
    work.kind = RowKind::kKept;
    const float floor = filters.min_p > 0.0F ? log_f32(std::min(filters.min_p, 1.0F)) : -kInf;
    list_candidates(work.scores, n, top_k ? reached_by(filters.top_k, work) : -kInf, floor, work);
    if (top_k) keep_top_k(filters.top_k, work);
    if (filters.top_p < 1.0F) keep_top_p(filters.top_p, work);
}

const float* dense_scores(i64 n, RowWork& work) {
    if (work.kind != RowKind::kKept) return work.scores;
    work.dense.assign(static_cast<std::size_t>(n), -kInf);
    for (std::size_t i = 0; i < work.ids.size(); ++i) work.dense[work.ids[i]] = work.kept[i];
    return work.dense.data();
}

std::int32_t draw_dense(const float* scores, i64 n, const DrawKey& key) {
    // The chunk of the best score goes first: it makes a sum that few other chunks can reach.
    i64 first = 0;
    float top = -kInf;
    for (i64 start = 0; start < n; start += kChunk) {
        const float here = max_of(scores + start, std::min<i64>(kChunk, n - start));
        if (here > top) {
            top = here;
            first = start;
        }
    }
    Best best;
    offer_chunk(scores, n, first, key, best);
    for (i64 start = 0; start < n; start += kChunk) {
        if (start != first) offer_chunk(scores, n, start, key, best);
    }
    return best.id;
}

std::int32_t sample_row(const float* logits, i64 n, const Filters& filters, const DrawKey& key, RowWork& work) {
    filter_row(logits, n, filters, work);
    switch (work.kind) {
        case RowKind::kUnusable: return -1;
        case RowKind::kGreedy: {
            const auto block = std::find(work.maxima.begin(), work.maxima.end(), work.best) - work.maxima.begin();
            i64 id = block * kBlock;
            while (logits[id] != work.best) ++id;
            return static_cast<std::int32_t>(id);
        }
        case RowKind::kKept:
            // a counter makes four words: one per listed id costs more than all of them once a quarter is listed
            if (static_cast<i64>(work.ids.size()) * 4 < n) return draw_listed(work.ids, work.kept, key);
            return draw_dense(dense_scores(n, work), n, key);
        case RowKind::kAll: break;
    }
    return draw_dense(work.scores, n, key);
}

void best_ids(const float* x, i64 n, i64 count, RowWork& work, std::int32_t* ids) {
    if (count <= 0) return;
    const float threshold = reached_by(count, work);
    work.ranks.clear();
    for (i64 block = 0; block < num_blocks(n); ++block) {
        if (!(work.maxima[static_cast<std::size_t>(block)] >= threshold)) continue;
        for (i64 v = block * kBlock; v < std::min(n, (block + 1) * kBlock); ++v) {
            if (x[v] >= threshold) work.ranks.push_back(rank_of(x[v], v));
        }
    }
    std::partial_sort(work.ranks.begin(), work.ranks.begin() + count, work.ranks.end(), std::greater<>());
    for (i64 i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(id_of(work.ranks[static_cast<std::size_t>(i)]));
}

}  // namespace deepinfer::cpu
