// One row against two panels at once: the product of a decoding request, which waits for memory.
//
// Two places read in turn keep more lines of memory on their way than one, and a processor follows both by itself; but the arithmetic
// between two lines takes a good part of the time that it looks ahead, so quantized weights and their scales are asked for as well. A
// column's chain of operations is the one of linear.h.
#pragma once

#include "linear.h"

namespace KVIST_NAMESPACE {

struct PanelOf {
  const Segment& segment;
  int panel;
};

// y[0] and y[1]: the row's 16 columns of each panel, without bias. Both segments have the row's k.
void pair_product(const PanelOf& first, const PanelOf& second, const Rows& row, float (*y)[kPanel]);

}  // namespace KVIST_NAMESPACE
