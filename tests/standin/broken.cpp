#include "broken.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "memory.h"

namespace standin {
namespace {

struct Plan {
  std::string kind;
  unsigned long from = 0;
  unsigned long to = ~0ul;
};
Plan plan;

struct Late {
  Address destination = 0;
  Address source = 0;
  size_t bytes = 0;
};
std::mutex mutex;
std::vector<Late>& late = *new std::vector<Late>;
std::atomic<unsigned long> waits{0};

bool of_a_peer(Address address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = region_at(address);
  return found != regions.end() && found->second.kind == Region::Kind::kImport;
}

void land_the_late() {
  std::vector<Late> landing;
  {
    std::lock_guard<std::mutex> lock(mutex);
    landing.swap(late);
  }
  for (const Late& copy : landing) {
    if (!accessible(copy.destination, copy.bytes) || !accessible(copy.source, copy.bytes)) continue;
    std::memcpy(reinterpret_cast<void*>(copy.destination),
                reinterpret_cast<const void*>(copy.source), copy.bytes);
  }
}

// Some memory of this process's own that is as large.
Address own_memory(size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (const auto& [base, region] : regions) {
    if (region.kind == Region::Kind::kAllocation && region.bytes >= bytes) return base;
  }
  return 0;
}

}  // namespace

void read_broken(const char* text) {
  plan = {};
  if (text == nullptr) return;
  char kind[16] = {};
  if (std::sscanf(text, "%15[^:]:%lu:%lu", kind, &plan.from, &plan.to) < 1) die(text);
  plan.kind = kind;
}

CopyPlan plan_copy(Address destination, Address source, size_t bytes) {
  CopyPlan copy{CopyPlan::Does::kCopy, destination, source};
  if (plan.kind.empty() || plan.kind == "early") return copy;
  Address& theirs = of_a_peer(source) ? copy.source : copy.destination;
  if (!of_a_peer(theirs)) return copy;
  if (plan.kind == "late") land_the_late();
  if (bytes < plan.from || bytes > plan.to) return copy;
  if (plan.kind == "late") {
    std::lock_guard<std::mutex> lock(mutex);
    late.push_back({destination, source, bytes});
  }
  if (plan.kind == "local") theirs = own_memory(bytes);
  if (plan.kind == "stuck") copy.does = CopyPlan::Does::kHang;
  if (plan.kind == "silent" || plan.kind == "late" || theirs == 0) {
    copy.does = CopyPlan::Does::kNothing;
  }
  return copy;
}

bool waits_are_broken() { return plan.kind == "early" && waits >= plan.from; }
bool next_wait_ends_early() { return plan.kind == "early" && waits++ >= plan.from; }

}  // namespace standin
