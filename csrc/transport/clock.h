// The clock of all waits and deadlines.
#pragma once

#include <chrono>

namespace pg_sdma {

using Clock = std::chrono::steady_clock;

}  // namespace pg_sdma
