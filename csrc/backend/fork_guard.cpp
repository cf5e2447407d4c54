#include "backend/fork_guard.h"

#include <pthread.h>

namespace pg_sdma {
namespace {

// Counted by a fork handler: cheaper on a hot path than asking the kernel who we are.
std::atomic<unsigned> generation{0};

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  made_in_ = generation.load(std::memory_order_relaxed);
}

bool ForkGuard::forked() const { return generation.load(std::memory_order_relaxed) != made_in_; }

}  // namespace pg_sdma
