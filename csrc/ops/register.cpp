// The operators of the namespace fast_ulysses. It is a fragment: upstream's library may define the namespace.
#include "ops/operators.hpp"

namespace fast_cp::ops {

std::vector<Operator> all_operators() {
  std::vector<Operator> all;
  for (auto* group : {&lifetime_operators, &info_operators, &exchange_operators, &gather_operators,
                      &all_to_all_operators, &projection_operators, &benchmark_operators}) {
    const std::vector<Operator> operators = group();
    all.insert(all.end(), operators.begin(), operators.end());
  }
  return all;
}

}  // namespace fast_cp::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fast_ulysses, library) {
  for (const fast_cp::ops::Operator& op : fast_cp::ops::all_operators()) library.def(op.schema);
}

// Not CUDA alone: several operators take no tensor, and a tensor on the wrong device should meet our sentence.
STABLE_TORCH_LIBRARY_IMPL(fast_ulysses, CompositeExplicitAutograd, library) {
  for (const fast_cp::ops::Operator& op : fast_cp::ops::all_operators()) library.impl(op.name().c_str(), op.boxed);
}
