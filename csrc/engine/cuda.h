// The CUDA engine: device tensors of NVIDIA GPUs. Needs the driver at run time and nothing of CUDA
// to build.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/engine.h"

namespace pg_sdma {

// The engine of device `ordinal`, which all groups of this process share. `library` is the driver
// to open, empty for libcuda.so.1. `current_stream` gives the native handle of the calling thread's
// current stream on that device. `batch_copies`: copies that follow one another go out in one call,
// where the driver has it; the first to open the engine decides. Throws CannotShare with the reason
// why this device cannot take part.
std::shared_ptr<Engine> cuda_engine(int ordinal, const std::string& library,
                                    std::function<void*()> current_stream,
                                    bool batch_copies = false);

}  // namespace pg_sdma
