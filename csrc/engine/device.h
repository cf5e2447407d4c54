// The engine of GPUs, by CUDA's driver or by HIP. Needs the driver at run time and no toolkit to
// build.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/driver.h"
#include "engine/engine.h"

namespace pg_sdma {

// The engine of device `ordinal`, which all groups of this process share. `library` is the driver
// to open, empty for the vendor's. `current_stream` gives the native handle of the calling thread's
// current stream on that device. Throws CannotShare with the reason why this device cannot take
// part.
std::shared_ptr<Engine> device_engine(driver::Vendor vendor, int ordinal,
                                      const std::string& library,
                                      std::function<void*()> current_stream);

}  // namespace pg_sdma
