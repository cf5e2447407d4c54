#include "transport/agreement/call_record.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "transport/call.h"
#include "transport/schedule/exchange.h"

namespace pg_sdma {
namespace {

// FNV-1a over words: equal calls hash alike on every rank, and a mismatch is told by the records.
class Fingerprint {
 public:
  void add(uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) hash_ = (hash_ ^ (value & 0xff)) * 0x100000001b3;
  }
  void add(const std::string& text) {
    for (const char c : text) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    add(text.size());
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), length);
  field[length] = 0;
}

}  // namespace

void CallRecord::refuse(CallState state, const char* reason) {
  summary.state = state;
  put(why, reason);
}

CallRecord describe(const Call& call, const Exchange& exchange, int world) {
  CallRecord record;
  put(record.operation, call.operation);
  put(record.dtype, call.dtype);
  put(record.reduction, call.reduction);
  record.tensors = static_cast<uint32_t>(exchange.exposed.size());
  const std::vector<uint64_t> shards = call.shards();
  record.call_tensors = static_cast<uint32_t>(shards.size());
  Fingerprint fingerprint;
  fingerprint.add(call.operation);
  fingerprint.add(call.dtype);
  fingerprint.add(call.reduction);
  // Of the whole call, so that its parts agree, or fail, all alike.
  for (const uint64_t bytes : shards) {
    record.total_bytes += bytes * static_cast<uint64_t>(world);
    fingerprint.add(bytes);
  }
  record.summary.signature = fingerprint.value();
  if (!call.invalid.empty()) record.refuse(CallState::kInvalid, call.invalid.c_str());
  return record;
}

}  // namespace pg_sdma
