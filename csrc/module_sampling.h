// Sampling for Python: the class `Sampling` and the function `score` of a native module.
#pragma once

#include <nanobind/nanobind.h>

namespace KVIST_NAMESPACE {

// Call after `Machine` is defined.
void define_sampling(nanobind::module_& m);

}  // namespace KVIST_NAMESPACE
