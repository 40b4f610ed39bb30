// What this library was built from and for: an operator, so that whoever loads the library can ask; and one text that
// can be read from the bytes of a file that does not load.
#include <torch/csrc/stable/library.h>

#include <string>

#include "build_record.h"

namespace {

std::string build_record() { return DEPTHCONV_BUILD_RECORD; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(depthconv, m) { m.def("_build_record() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(depthconv, CompositeExplicitAutograd, m) {
  m.impl("_build_record", TORCH_BOX(&build_record));
}
