// From an operator's arguments to a request, with the checks that need both.
#pragma once

#include <optional>
#include <string>

#include "ops/checks.hpp"

namespace fast_cp::ops {

// How tokens and heads are split. The ulysses degree is the number of head counts; `text` is
// [kv_front, kv_back, q_front, q_back]: rows of replicated text around the tokens.
struct Split {
  Ints seq_lens, q_heads, kv_heads, text;
  Ints chunks = {1};
};

// `own_rows`: tokens that this rank passed, to be compared with the split; -1 where there are none to compare.
Exchange shape_of(const Runtime& runtime, const Split& split, const View& like, int64_t own_rows);

// Throws unless it is 0, 1 or -1 (the two take turns).
int checked_generation(int64_t generation);

Request qkv_request(const Runtime& runtime, const std::optional<Tensor>& q, const Tensor& k, const Tensor& v,
                    const Split& split, const std::string& tag, const std::string& transfer);

// `o` (batch, q_front + tokens of the group + q_back, this rank's query heads, head_dim).
Request return_request(const Runtime& runtime, const Tensor& o, const Split& split, bool send_text,
                       const std::string& tag, const std::string& transfer);

}  // namespace fast_cp::ops
