// Programs for Python: the class `Program` of a native module.
#pragma once

#include <nanobind/nanobind.h>

namespace KVIST_NAMESPACE {

// Call after `Machine`, `Linear` and `AttentionLayer` are defined.
void define_program(nanobind::module_& m);

}  // namespace KVIST_NAMESPACE
