// Whether this processor's 16-bit dot product has the bits that kv_format.h defines. A build without the instruction has them always.
#pragma once

namespace KVIST_NAMESPACE {

bool bf16_dot_as_defined();

}  // namespace KVIST_NAMESPACE
