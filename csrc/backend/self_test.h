// The transport's self-test on tensors of a device.
#pragma once

#include <c10/core/DeviceType.h>

#include <chrono>
#include <string>

#include "engine/engine.h"
#include "transport/direct_pull.h"

namespace pg_sdma {

// As the self_test of transport/self_test.h, with the memory that torch's allocator gives.
std::string self_test(DirectPull& transport, const Engine& engine, c10::DeviceType device, int rank,
                      int world, std::chrono::steady_clock::time_point deadline);

}  // namespace pg_sdma
