// What the parts of the Python module share: types of the arrays that cross, and how a wrong one is refused.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>

namespace KVIST_NAMESPACE {

template <class T, size_t N>
using Array = nanobind::ndarray<T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;
using Release = nanobind::call_guard<nanobind::gil_scoped_release>;

inline void require(bool ok, const char* what) {
  if (!ok) throw nanobind::value_error(what);
}

}  // namespace KVIST_NAMESPACE
