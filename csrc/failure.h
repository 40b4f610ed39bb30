// Why a CUDA kernel did not start, in words: what this build has code for, and what the machine is. Plain C++, so that
// a test can ask about machines that are not at hand.
#pragma once

#include <cstdlib>
#include <sstream>
#include <string>

namespace depthconv {

// What the CUDA runtime says of the machine; zeros and empty where it could not say.
struct Machine {
  int driver = 0;            // 13000: the newest CUDA that the driver serves
  int major = 0, minor = 0;  // compute capability
  std::string device;
};

enum class Serves : int { no, by_ptx, by_machine_code };

// Whether code named like sm_90, sm_90a, sm_100f or compute_120 runs on a device. Machine code serves the later minors
// of its major, with the suffix `a` nothing but its own; PTX serves all that came later.
inline Serves serves(const std::string& name, int major, int minor) {
  const bool ptx = name.rfind("compute_", 0) == 0;
  char* suffix = nullptr;
  const long code = std::strtol(name.c_str() + (ptx ? 8 : 3), &suffix, 10);
  const long device = major * 10 + minor;
  if (*suffix == 'a') return code != device ? Serves::no : ptx ? Serves::by_ptx : Serves::by_machine_code;
  if (code > device || ((!ptx || *suffix == 'f') && code / 10 != major)) return Serves::no;
  return ptx ? Serves::by_ptx : Serves::by_machine_code;
}

// "13.0" as the driver's number of it: 13000.
inline int cuda_number(const std::string& version) {
  char* minor = nullptr;
  const long major = std::strtol(version.c_str(), &minor, 10);
  return static_cast<int>(major * 1000 + (*minor == '.' ? std::strtol(minor + 1, nullptr, 10) * 10 : 0));
}

inline std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

// `architectures` and `cuda` are the build's, as in its record: "sm_90 compute_90" and "13.0".
inline std::string explain_failure(const std::string& error, const std::string& architectures, const std::string& cuda,
                                   const Machine& machine) {
  Serves best = Serves::no;
  std::istringstream names(architectures);
  for (std::string name; names >> name;)
    if (const Serves one = serves(name, machine.major, machine.minor); one > best) best = one;
  const std::string capability = std::to_string(machine.major) + "." + std::to_string(machine.minor);
  const std::string rebuild = "rebuild depthconv with TORCH_CUDA_ARCH_LIST=" + capability + ".";
  const int built = cuda_number(cuda);

  std::string text = "depthconv: a CUDA kernel could not run: " + error + ". ";
  if (machine.driver == 0)
    text += "No NVIDIA driver was found. ";
  else if (machine.driver / 1000 < built / 1000)
    text += "The driver is too old for this build: install one for CUDA " + cuda_version(built / 1000 * 1000) +
            " or later, or rebuild depthconv with nvcc " + std::to_string(machine.driver / 1000) + ". ";
  else if (machine.major && best == Serves::no)
    text += "No code of this build runs on this device: " + rebuild + " ";
  else if (machine.major && best == Serves::by_ptx && machine.driver < built)
    text +=
        "Of this build only the PTX suits this device, and the driver is too old to compile it: install one for "
        "CUDA " +
        cuda + " or later, or " + rebuild + " ";
  text += "Built for: " + architectures + ", CUDA " + cuda + ". Found: ";
  text += machine.major ? machine.device + " of compute capability " + capability : "a device that does not answer";
  text += machine.driver ? ", a driver for CUDA " + cuda_version(machine.driver) + "." : ", no driver.";
  return text;
}

// The same of this build and of a device at hand; CUDA builds only.
namespace cuda {
std::string explain_failure(const char* error, int device);
}  // namespace cuda

}  // namespace depthconv
