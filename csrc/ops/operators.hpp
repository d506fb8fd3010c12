// Every file in this folder gives its operators as a table of schemas and functions; register.cpp registers them all.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "ops/text.hpp"

namespace fast_cp::ops {

struct Operator {
  const char* schema;
  void (*boxed)(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
  std::string name() const { return std::string(schema).substr(0, std::string(schema).find('(')); }
};

std::vector<Operator> lifetime_operators();
std::vector<Operator> info_operators();
std::vector<Operator> exchange_operators();
std::vector<Operator> gather_operators();
std::vector<Operator> all_to_all_operators();
std::vector<Operator> projection_operators();
std::vector<Operator> benchmark_operators();

std::vector<Operator> all_operators();

}  // namespace fast_cp::ops
