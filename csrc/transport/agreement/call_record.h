// A call as its peers see it, in a record on the control page.
#pragma once

#include <array>
#include <cstdint>

#include "engine/engine.h"
#include "transport/agreement/protocol.h"

namespace pg_sdma {

struct Call;
struct Exchange;

// Tensors that one numbered operation carries at most; a longer coalesced call is several
// operations.
constexpr int kMaxTensors = 64;

struct CallRecord {
  CallSummary summary;
  uint32_t tensors = 0;       // of this operation
  uint32_t call_tensors = 0;  // of the call that it is a part of
  uint32_t pulls = 0;         // whether this rank asks for pulls instead of staging buffers
  char operation[40] = {};
  char dtype[20] = {};
  char reduction[44] = {};   // of a reduce-scatter
  uint64_t total_bytes = 0;  // of the call
  union {
    std::array<Place, kMaxTensors> places{};  // kShareable
    char why[256];                            // kUnshareable, kInvalid
  };

  void refuse(CallState state, const char* reason);
};

// All of it but the places, `pulls`, and whether the memory can be shared.
CallRecord describe(const Call& call, const Exchange& exchange, int world);

}  // namespace pg_sdma
