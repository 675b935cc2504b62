// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"
#include <algorithm>

namespace kvbm_cxl {

void Uses::add(Registration* registration) {
    if (registration && std::find(registrations_.begin(), registrations_.end(), registration) == registrations_.end())
        registrations_.push_back(registration);
}

bool Uses::begin() noexcept {
    for (size_t i = 0; i < registrations_.size(); i++) {
        if (registrations_[i]->begin_use())
            continue;
        while (i-- > 0)
            registrations_[i]->end_use();
        return false;
    }
    return true;
}

void Uses::end() noexcept {
    for (Registration* registration : registrations_)
        registration->end_use();
}

} // namespace kvbm_cxl
