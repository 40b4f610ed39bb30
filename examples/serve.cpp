// Runs a compiled model (AOTInductor package) with depthconv's operators, without Python.
//
//   serve OPERATORS PACKAGE [ROWS]
//
// OPERATORS is depthconv/_ops.so, PACKAGE what torch._inductor.aoti_compile_and_package made of a model with one input
// (N, 8, H, 6). The operators' library registers them as it is loaded; nothing else of depthconv is needed.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: serve OPERATORS PACKAGE [ROWS]\n");
    return 2;
  }
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const int64_t rows = argc > 3 ? std::atoll(argv[3]) : 16;
  const at::Tensor x = at::linspace(-1, 1, 2 * 8 * rows * 6).reshape({2, 8, rows, 6});
  const at::Tensor y = model.run({x}).at(0);
  std::printf("%.6f\n", y.square().sum().item<double>());
}
