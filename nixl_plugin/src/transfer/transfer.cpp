// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"
#include <algorithm>

namespace kvbm_cxl {

void Uses::add(Registration* registration) {
    if (registration && std::find(registrations_.begin(), registrations_.end(), registration) == registrations_.end())
        registrations_.push_back(registration);
    if (registration && registration->loan)
        loan_ = registration->loan.get();
}

bool Uses::begin() noexcept {
    for (size_t i = 0; i < registrations_.size(); i++) {
        if (registrations_[i]->begin_use())
            continue;
        while (i-- > 0)
            registrations_[i]->end_use();
        return false;
    }
    if (!loan_ || are_lent())
        return true;
    end();
    return false;
}

bool Uses::are_lent() noexcept {
    link_ = loan_->begin();
    return link_ != 0 && std::all_of(registrations_.begin(), registrations_.end(), [this](const Registration* registration) {
               return !registration->loan || registration->loan->begin() == link_;
           });
}

Status Uses::refusal() const {
    if (std::any_of(registrations_.begin(), registrations_.end(), [](const Registration* used) { return used->is_closed(); }))
        return {NIXL_ERR_NOT_FOUND, "CXL: a transfer was posted whose memory is deregistered: prepare it again"};
    if (loan_ && loan_->access->link() != 0)
        return {NIXL_ERR_NOT_FOUND, "CXL: a transfer was posted when the peer had taken back memory of it: post it again if the peer has "
                                    "registered that again"};
    return {NIXL_ERR_BACKEND, "CXL: a transfer was posted when the link to the peer ended: post it again"};
}

void Uses::end() noexcept {
    for (Registration* registration : registrations_)
        registration->end_use();
}

} // namespace kvbm_cxl
