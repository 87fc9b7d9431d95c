// Records of a paged cache: where they lie and how they are read and written.
#pragma once

#include <tuple>

#include "rows.hpp"

namespace deepinfer::cpu {

// (address, bytes from page to page, pages, records per page, kind of the codes, head_dim, sectioned), as Python passes
// it.
using CacheArgs = std::tuple<Address, i64, i64, i64, int, i64, bool>;

struct Cache {
    u8* data;
    i64 page_stride;  // may exceed the page's bytes: pools are views into wider blocks
    i64 pages;
    i64 records;
    int kind;
    i64 dim;
    bool sectioned;

    explicit Cache(const CacheArgs& args)
        : data(at<u8>(std::get<0>(args))),
          page_stride(std::get<1>(args)),
          pages(std::get<2>(args)),
          records(std::get<3>(args)),
          kind(std::get<4>(args)),
          dim(std::get<5>(args)),
          sectioned(std::get<6>(args)) {}

    // Codes and scales of a slot. 64-bit throughout: pages times bytes can pass 2^31.
    struct Record {
        u8* codes;
        u8* scales;
    };

    Record record(i64 slot) const {
        check_index(slot, pages * records, "slot");
        u8* page = data + slot / records * page_stride;
        const i64 offset = slot % records, codes = code_bytes(kind, dim), scales = scale_bytes(kind, dim);
        if (sectioned) return {page + offset * codes, page + records * codes + offset * scales};
        u8* codes_at = page + offset * (codes + scales);
        return {codes_at, codes_at + codes};
    }

    void read(i64 slot, float* out) const {
        const Record r = record(slot);
        if (kind == kF32) {
            widen(r.codes, kF32, dim, out);
        } else {
            decode_row(r.codes, r.scales, kind, dim, out);
        }
    }

    void write(i64 slot, const float* values) const {
        const Record r = record(slot);
        if (kind == kF32) {
            narrow(values, dim, kF32, r.codes);
        } else {
            encode_row(values, dim, kind, r.codes, r.scales);
        }
    }
};

}  // namespace deepinfer::cpu
