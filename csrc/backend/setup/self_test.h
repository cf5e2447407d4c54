// The transport's self-test on tensors of a device.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "transport/direct_transport.h"
#include "transport/setup/self_test.h"

namespace pg_sdma {

// From torch's allocator, on this very device, whichever is the current one.
std::unique_ptr<TestMemory> test_memory(c10::Device device);

// As the self_test of transport/setup/self_test.h.
TestResult self_test(DirectTransport& transport, TestMemory& memory, const Engine& engine, int rank,
                     int world, std::chrono::steady_clock::time_point deadline);

}  // namespace pg_sdma
