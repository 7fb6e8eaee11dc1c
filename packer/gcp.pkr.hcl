# SPDX-License-Identifier: Apache-2.0
# A Compute Engine image with the daemon enabled.

source "googlecompute" "swansong" {
  project_id   = var.gcp_project
  zone         = var.gcp_zone
  subnetwork   = var.gcp_subnetwork
  machine_type = var.gcp_machine_type
  image_name   = "${var.image_name}-${local.stamp}"
  image_family = var.image_name

  source_image_family     = var.gcp_source_family
  source_image_project_id = [var.gcp_source_project]

  ssh_username              = "packer"
  ssh_clear_authorized_keys = true
}
