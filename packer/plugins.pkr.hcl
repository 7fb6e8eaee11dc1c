# SPDX-License-Identifier: Apache-2.0
# Packer 1.7 and later fetches these with `packer init`.  Kept alone in this file because the builders
# are part of Packer 1.6, which knows no such block: leave the file out there.

packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = ">= 1.2.0"
    }
    googlecompute = {
      source  = "github.com/hashicorp/googlecompute"
      version = ">= 1.1.0"
    }
  }
}
