// SPDX-License-Identifier: Apache-2.0
#include "counters.h"

namespace kvbm_cxl {

void CountReport::tell(cxl_pool_t* pool, const Counters::Values& values) noexcept {
    std::array<cxl_shm_count_t, Counters::count> changes;
    size_t changed = 0;
    for (size_t index = 0; index < Counters::count; index++) {
        if (values[index] != told_[index])
            changes[changed++] = {static_cast<uint32_t>(Counters::at(index)), 0, static_cast<int64_t>(values[index] - told_[index])};
    }
    if (changed > 0 && cxl_shm_count(pool, changes.data(), changed) == CXL_SHM_OK)
        told_ = values;
}

} // namespace kvbm_cxl
