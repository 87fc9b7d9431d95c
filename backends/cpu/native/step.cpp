// Correcting a planned step once the step before it is known; see `ops/step.py`.
#include <algorithm>
#include <vector>

#include "bind.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

struct Step {
    i64 rows, sequences;
    Address input_ids, positions, seq_lens, window_slots, ratio_slots;
    i64 ratio_slots_width;
    Address cu_seqlens, row_to_seq, previous;
    i64 previous_sequences;
    Address planned, accepted, sampled_ids, draft_ids;
    i64 num_drafts;
    Address block_tables;
    i64 max_blocks, block_size;
    Address window_tables;
    i64 max_pages;
    Address window_first_page;
    i64 window_page;
};

i32& cell(Address array, i64 index) { return at<i32>(array)[index]; }

void advance(const Step& s, const std::vector<i64>& ratios) {
    const i64 rows = cell(s.cu_seqlens, s.sequences);
    if (rows == 0) return;
    check_index(rows - 1, s.rows, "row");
    std::vector<i32> back(static_cast<std::size_t>(s.sequences), 0);
    for (i64 seq = 0; seq < s.sequences; ++seq) {
        const i64 source = cell(s.previous, seq);
        if (source < 0) continue;
        check_index(source, s.previous_sequences, "previous sequence");
        back[static_cast<std::size_t>(seq)] = cell(s.planned, source) - cell(s.accepted, source);
        cell(s.seq_lens, seq) -= back[static_cast<std::size_t>(seq)];
    }
    for (i64 row = 0; row < rows; ++row) {
        const i64 seq = cell(s.row_to_seq, row);
        check_index(seq, s.sequences, "sequence");
        const i64 source = cell(s.previous, seq);
        if (source < 0) continue;
        cell(s.positions, row) -= back[static_cast<std::size_t>(seq)];
        const i64 place = row - cell(s.cu_seqlens, seq), position = cell(s.positions, row);
        const bool drafted = s.num_drafts > 0 && place != 0;
        const i64 draft = source * s.num_drafts + std::clamp<i64>(place - 1, 0, std::max<i64>(s.num_drafts - 1, 0));
        cell(s.input_ids, row) = drafted ? cell(s.draft_ids, draft) : cell(s.sampled_ids, source);
        const i64 column = position / s.window_page - cell(s.window_first_page, seq);
        const i64 page = cell(s.window_tables, seq * s.max_pages + std::clamp<i64>(column, 0, s.max_pages - 1));
        cell(s.window_slots, row) = static_cast<i32>(page * s.window_page + position % s.window_page);
        for (std::size_t which = 0; which < ratios.size(); ++which) {
            const i64 ratio = ratios[which], per_block = s.block_size / ratio, entry = position / ratio;
            i64 slot = -1;
            if ((position + 1) % ratio == 0) {
                const i64 block = std::min(entry / per_block, s.max_blocks - 1);
                slot =
                    static_cast<i64>(cell(s.block_tables, seq * s.max_blocks + block)) * per_block + entry % per_block;
            }
            cell(s.ratio_slots, static_cast<i64>(which) * s.ratio_slots_width + row) = static_cast<i32>(slot);
        }
    }
}

// `numbers` are the fields of Step in order.
void advance_step(const py::tuple& numbers, const py::tuple& ratios) {
    std::vector<i64> f, r;
    for (const py::handle& item : numbers) f.push_back(item.cast<i64>());
    for (const py::handle& item : ratios) r.push_back(item.cast<i64>());
    if (f.size() != 24) throw std::invalid_argument("advance_step takes 24 numbers");
    const auto a = [&](std::size_t i) { return static_cast<Address>(f[i]); };
    advance({f[0],  f[1],  a(2),  a(3),  a(4),  a(5),  a(6),  f[7],  a(8),  a(9),  a(10), f[11],
             a(12), a(13), a(14), a(15), f[16], a(17), f[18], f[19], a(20), f[21], a(22), f[23]},
            r);
}

}  // namespace

void bind_step(py::module_& m) { m.def("advance_step", &advance_step); }

}  // namespace deepinfer::cpu
