// The last step of the vote: known bytes over the transport into poisoned outputs, so that a driver
// that does not do what it says is found out before it carries anything of the user's.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

// Memory of the engine's device, for a test that knows no tensors.
class TestMemory {
 public:
  virtual ~TestMemory() = default;
  // `bytes` of it, until this is destroyed.
  virtual char* allocate(size_t bytes) = 0;
  // Both have ended when they return, behind what the caller's current stream holds.
  virtual void put(char* to, const std::vector<unsigned char>& bytes) = 0;
  virtual std::vector<unsigned char> get(const char* from, size_t bytes) = 0;
  // What was allocated is never freed: a copy that hangs may still come to an end.
  virtual void keep() = 0;
};

struct SelfTest {
  int rank = 0;
  int world = 1;
  bool stream_ordered = false;
  Doubts doubts;
  std::chrono::steady_clock::time_point deadline;
  // For one gather on the device, where the deadline leaves twice as much.
  std::chrono::milliseconds patience{30000};
};

struct TestResult {
  std::string wrong;  // on this rank, empty when all was right
  CopySpeed copies;   // on rank 0, where it tells for how long to wait for late ranks
};

// Gathers shards of several sizes at odd addresses, whose bytes every rank can compute; where the
// engine's waits are in doubt, also holds a rank back and looks whether its peers wait. Returns
// what it found. Whatever goes wrong is no reason to end the process. Throws GroupFault. `memory`
// has to last until all ranks are through.
TestResult self_test(DirectTransport& transport, TestMemory& memory, const SelfTest& test);

}  // namespace pg_sdma
